"""The command line of the lab.

Commands import what they run with when they run, so that help, versions and mistakes are answered at once.
"""

from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from llqr_lab.bench.cli import bench
from llqr_lab.options import (
    Data,
    Device,
    Scale,
    Seed,
    known_base,
    known_network,
    known_subject,
    positive_number,
    step_numbers,
    writable_file,
    writable_picture,
)

app = typer.Typer(name="llqr", no_args_is_help=True, add_completion=False)
app.add_typer(bench)

Runs = Annotated[Path, typer.Option(help="The folder of runs.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"llqr {version('llqr')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Layerwise LQR for geometry-aware optimization of deep networks."""


@app.command()
def demo(
    output: Annotated[Path, typer.Option(callback=writable_picture, help="The picture to write.")] = Path("demo.png"),
    seed: Seed = 0,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each optimizer.")] = 300,
) -> None:
    """Train a small network on digits by SGD with momentum and by AdamW, alone and with LLQR around them."""
    from llqr_lab.demo import show

    show(output, seed, steps)


@app.command()
def plan(
    network: Annotated[
        str, typer.Argument(callback=known_network, help="mlp, convnet, resnet18 or transformer, of the lab.")
    ],
    batch: Annotated[int, typer.Option(min=2, help="Examples in a batch.")] = 128,
    seed: Seed = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of the measurement; medians are reported.")] = 3,
) -> None:
    """How LLQR steps each parameter of a network, and what it costs in training steps and bytes."""
    from llqr_lab.planning import show

    show(network, batch, seed, repeats)


@app.command()
def compare(
    network: Annotated[
        str,
        typer.Argument(
            callback=known_subject,
            help="digits, digits-batchnorm, fashion, shakespeare, on their data; or a network of llqr plan, on random batches.",
        ),
    ],
    base: Annotated[str, typer.Option(callback=known_base, help="What trains it: sgdm or adamw.")] = "sgdm",
    lr: Annotated[
        float | None, typer.Option(help="The base's learning rate; else 0.05 (sgdm) or 0.001 (adamw).")
    ] = None,
    at: Annotated[str, typer.Option(callback=step_numbers, help="After how many steps to look.")] = "0,10,30,100,300",
    batch: Annotated[int, typer.Option(min=2, help="Examples in a batch.")] = 128,
    damping: Annotated[float, typer.Option(callback=positive_number, help="λ of the exact step.")] = 0.01,
    products: Annotated[int, typer.Option(min=1, help="The most products with H that an exact step may take.")] = 400,
    draws: Annotated[int, typer.Option(min=1, help="Backward passes for the diagonal of H.")] = 200,
    inner: Annotated[int, typer.Option(min=1, help="Inner steps of LLQR's fits.")] = 25,
    blocks: Annotated[bool, typer.Option(help="Solve for H cut to blocks too, which takes longest.")] = True,
    seed: Seed = 0,
    data: Data = None,
    output: Annotated[Path | None, typer.Option(help="The JSON file; else results/compare_NETWORK_BASE.json.")] = None,
    figure: Annotated[Path | None, typer.Option(help="The figure; else results/compare_NETWORK_BASE.png.")] = None,
) -> None:
    """What optimizers would do at several moments of a training, held against the exact step."""
    output = writable_file(output or Path(f"results/compare_{network}_{base}.json"))
    figure = writable_picture(figure or Path(f"results/compare_{network}_{base}.png"))
    rate = positive_number(lr) if lr is not None else {"sgdm": 0.05, "adamw": 1e-3}[base]
    from llqr_lab.compare.command import main
    from llqr_lab.compare.look import Settings
    from llqr_lab.experiments.cli import told

    settings = Settings(damping, products, draws, inner, blocks)
    with told():
        main(network, base, rate, list(map(int, at.split(","))), batch, settings, seed, data, output, figure)


@app.command()
def scaling(
    ranks: Annotated[
        list[int] | None, typer.Option(min=1, help="Numbers of ranks; may be given several times.")
    ] = None,
    bandwidth: Annotated[float, typer.Option(min=0.001, help="Gigabytes a second through a rank.")] = 50.0,
    arithmetic: Annotated[float, typer.Option(min=0.001, help="Teraflops of a rank, as reached in training.")] = 400.0,
    single: Annotated[float, typer.Option(min=0.001, help="Teraflops of a rank in float32, in which U acts.")] = 50.0,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a training step, on all ranks.")] = 4_000_000,
    every: Annotated[int, typer.Option(min=1, help="Steps between refits.")] = 500,
    steps: Annotated[int, typer.Option(min=1, help="Inner steps of a refit.")] = 25,
) -> None:
    """What U costs a network of 6.7 billion parameters on many ranks, counted: memory, messages, time (docs/scaling.md)."""
    from llqr_lab.scaling import Machine, show

    show(ranks or [8, 64, 1024], Machine(1e9 * bandwidth, 1e12 * arithmetic, 1e12 * single, tokens), every, steps)


@app.command()
def rosenbrock(
    output: Annotated[Path, typer.Option(callback=writable_file, help="The JSON file to write.")] = Path(
        "results/rosenbrock.json"
    ),
    loss_figure: Annotated[Path, typer.Option(callback=writable_picture, help="The figure of losses to write.")] = Path(
        "results/rosenbrock_loss.png"
    ),
    paths_figure: Annotated[Path, typer.Option(callback=writable_picture, help="The figure of paths to write.")] = Path(
        "results/rosenbrock_paths.png"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="A few iterations of each, to see that it works.")] = False,
) -> None:
    """The paper's toy example: Newton, Riccati and LLQR on the Rosenbrock function (some four minutes)."""
    if loss_figure.resolve() == paths_figure.resolve():
        raise typer.BadParameter("the same file as --loss-figure", param_hint="--paths-figure")
    from llqr_lab.rosenbrock.command import main

    main(output, loss_figure, paths_figure, quick)


@app.command()
def train(
    context: typer.Context,
    target: Annotated[
        str, typer.Argument(metavar="TASK", help="A preset (llqr train --list), or a configuration in TOML.")
    ] = "",
    scale: Annotated[
        str | None, typer.Option(help="paper, cpu (hours on two cores; the default) or smoke (seconds).")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="base (else), default (LLQR, nothing set), or the paper's: diagonal-ngd, ekfac-newton, kfac-ngd-scalefree."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**32 - 1, help="Seed of everything random; else 0.")] = None,
    data: Data = None,
    runs: Runs = Path("runs"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a stopped run was.")] = False,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a setting: --set llqr.every=100. Give it again for more."),
    ] = None,
    device: Device = "auto",
    workers: Annotated[int, typer.Option(min=0, help="Processes that make batches ahead of time.")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch; else its own choice.")] = None,
    checkpoint_seconds: Annotated[float, typer.Option(min=0, help="Between checkpoints.")] = 60.0,
    listed: Annotated[bool, typer.Option("--list", help="Print the presets and exit.")] = False,
) -> None:
    """Train one network: a preset of the paper's experiments, at a scale, by a method, from a seed.

    The run's folder is RUNS/preset/scale/method/seed-N. Stopped in whatever way, it goes on with --resume as if it hadn't been.
    """
    from llqr_lab.experiments import cli as experiments

    if listed or not target:
        experiments.list_presets()
        return
    with experiments.told():
        config = experiments.configuration(target, scale, method, seed, changes or [])
        experiments.train(config, runs, data, resume, device, workers, threads, checkpoint_seconds, context)


@app.command()
def sweep(
    presets: Annotated[list[str], typer.Argument(metavar="PRESET...", help="Presets (llqr train --list), or all.")],
    scale: Scale = "cpu",
    methods: Annotated[str, typer.Option(help="Methods, with commas between; else those of the preset's table.")] = "",
    seeds: Annotated[str, typer.Option(help="Seeds: 0-4, or 0,1,7.")] = "0-2",
    ablation: Annotated[
        str, typer.Option(help="One of the paper's ablations: damping, inner, ema, warm-start, solver.")
    ] = "",
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="A setting with one value or several: --set llqr.every=50,100. Give it again for a grid."
        ),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time; else one for each core.")] = None,
    data: Data = None,
    runs: Runs = Path("runs"),
    device: Device = "auto",
    dry: Annotated[bool, typer.Option("--dry-run", help="Print what would be run, and exit.")] = False,
) -> None:
    """Many runs: methods, seeds and settings, in parallel; what is done is skipped, what was stopped goes on."""
    from llqr_lab.experiments import cli as experiments

    with experiments.told():
        experiments.sweep(presets, scale, methods, seeds, ablation, changes or [], jobs, data, runs, device, dry)


@app.command()
def table(
    source: Annotated[Path, typer.Argument(help="The folder of runs, or a file of results that --save wrote.")] = Path(
        "runs"
    ),
    presets: Annotated[
        str, typer.Option(help="Only presets whose name has this in it, or one of several with commas.")
    ] = "",
    scale: Annotated[str, typer.Option(help="Only this scale: paper, cpu or smoke.")] = "",
    save: Annotated[Path | None, typer.Option(help="Keep the results and curves in this JSON file too.")] = None,
    page: Annotated[
        Path | None, typer.Option(help="Write them into this page too, between its marks: docs/reproduction.md.")
    ] = None,
) -> None:
    """Results beside the paper's: mean and standard error over seeds, and time relative to the base."""
    from llqr_lab.experiments import cli as experiments

    written = [writable_file(path) if path else None for path in (save, page)]
    with experiments.told():
        experiments.table(source, presets, scale, *written)


@app.command()
def figure(
    kind: Annotated[
        str,
        typer.Argument(
            help="curves, grokking, or an ablation: damping, inner, ema, warm-start, solver. Or of docs/mathematics.md: steps, "
            "stages, relaxation."
        ),
    ],
    presets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PRESET...",
            help="The preset that is drawn, for curves also several, one panel each; not for grokking, which has all "
            "operations, nor for the last three.",
        ),
    ] = None,
    methods: Annotated[str, typer.Option(help="Only these methods, with commas between.")] = "",
    source: Annotated[Path, typer.Option(help="The folder of runs, or a file of results.")] = Path("runs"),
    scale: Scale = "cpu",
    output: Annotated[Path, typer.Option(callback=writable_picture, help="The picture to write.")] = Path("figure.png"),
) -> None:
    """Draw training curves with standard errors, box plots of grokking, an ablation, or the mathematics."""
    from llqr_lab.experiments import cli as experiments

    with experiments.told():
        experiments.figure(kind, presets or [], methods, source, scale, output)


@app.command()
def report(
    sources: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUNS...", help="Folders of runs, or files of results that `llqr table --save` wrote."),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", callback=writable_file, help="The page to write.")] = Path(
        "report.html"
    ),
) -> None:
    """Runs as one page that needs nothing else: settings, curves, tables beside the paper's, where the time went."""
    from llqr_lab.experiments.cli import told

    with told():
        from llqr_lab.report.command import write_report

        typer.echo(write_report(sources or [Path("runs")], output))


@app.command()
def data(
    name: Annotated[str, typer.Argument(help="A data set to check thoroughly; else all are listed.")] = "",
    folder: Annotated[Path | None, typer.Option("--data", help="The folder with data sets; else LLQR_DATA.")] = None,
) -> None:
    """Which data sets there are, which of them are at hand, and where to get the others."""
    from llqr_lab.data.command import check, show

    if name:
        check(name, folder)
    else:
        show(folder)
