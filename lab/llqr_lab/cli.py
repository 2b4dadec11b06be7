"""The command line. Commands import what they run with when they run, so that help and mistakes are answered at once."""

import os
import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from llqr_lab import options
from llqr_lab.errors import ConfigError, check_names
from llqr_lab.options import command, name_list, seed_list, writable_file, writable_picture

app = typer.Typer(name="llqr", no_args_is_help=True, add_completion=False)
bench = typer.Typer(name="bench", no_args_is_help=True, help="Measure the methods against each other.")
app.add_typer(bench)
CORES = os.cpu_count() or 1


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"llqr {version('llqr')}")
        raise typer.Exit


@app.callback()
def version_option(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Layerwise LQR for geometry-aware optimization of deep networks."""


@command(app)
def demo(
    output: options.Picture = Path("demo.png"),
    seed: options.Seed = 0,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each optimizer.")] = 300,
) -> None:
    """Train a small network on digits by SGD with momentum and by AdamW, alone and with LLQR around them."""
    from llqr_lab.demo import show

    show(output, seed, steps)


@command(app)
def scaling(
    figure: Annotated[
        Path | None, typer.Option(callback=writable_picture, help="Draw it by numbers of devices too.")
    ] = None,
    page: options.Page = None,
) -> None:
    """What LLQR costs networks of a million to seven billion parameters, on one device to a thousand: counted, not measured."""
    from llqr_lab import scaling
    from llqr_lab.results import check_page, write_page

    check_page(page, scaling.COMMAND)
    typer.echo(scaling.table())
    if figure:
        scaling.draw(figure)
    if page:
        write_page(page, scaling.COMMAND, scaling.table())


@command(app)
def rosenbrock(
    output: options.Output = Path("results/rosenbrock.json"),
    loss_figure: options.Picture = Path("results/rosenbrock_loss.png"),
    paths_figure: options.Picture = Path("results/rosenbrock_paths.png"),
    quick: Annotated[bool, typer.Option("--quick", help="A few iterations of each, to see that it works.")] = False,
) -> None:
    """The paper's toy example: Newton, Riccati and LLQR on the Rosenbrock function (some four minutes)."""
    from llqr_lab.rosenbrock import main

    main(output, loss_figure, paths_figure, quick)


@command(app)
def train(
    target: Annotated[
        str, typer.Argument(metavar="TASK", help="A preset (llqr train --list), or a configuration in TOML.")
    ] = "",
    scale: Annotated[
        str | None, typer.Option(help="paper, cpu (hours on two cores; the default) or smoke (seconds).")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(help="base (else), default (LLQR, nothing set), or the paper's: diagonal-ngd, ekfac-newton, …"),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**32 - 1, help="Seed of everything random; else 0.")] = None,
    data: options.Data = None,
    runs: options.Runs = Path("runs"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a stopped run was.")] = False,
    changes: options.Changes = None,
    device: options.Device = "auto",
    workers: Annotated[int, typer.Option(min=0, help="Processes that make batches ahead of time.")] = 0,
    threads: options.Threads = None,
    checkpoint_seconds: Annotated[float, typer.Option(min=0, help="Between checkpoints.")] = 60.0,
    listed: Annotated[bool, typer.Option("--list", help="Print the presets and exit.")] = False,
) -> None:
    """Train one network: a preset of the paper's experiments, at a scale, by a method, from a seed.

    The run's folder is RUNS/preset/scale/method/seed-N. Stopped in whatever way, it goes on with --resume as if it hadn't been.
    """
    import torch

    from llqr_lab.experiments import command
    from llqr_lab.experiments.loop import StoppedError

    if listed or not target:
        command.list_presets()
        return
    config = command.configuration(target, scale, method, seed, changes or [])
    if threads:
        torch.set_num_threads(threads)
    try:
        result = command.run(config, runs, data, resume, device, workers, checkpoint_seconds)
    except StoppedError as stopped:
        words = ["llqr", *(word for word in sys.argv[1:] if word != "--resume"), "--resume"]
        typer.echo(f"The run was {stopped}. To go on:\n  {shlex.join(words)}", err=True)
        raise typer.Exit(128 + stopped.number) from None
    typer.echo(command.describe(result))


@command(app)
def sweep(
    presets: Annotated[list[str], typer.Argument(metavar="PRESET...", help="Presets (llqr train --list), or all.")],
    scale: options.Scale = "cpu",
    methods: Annotated[str, typer.Option(help="Methods, with commas between; else those of the preset's table.")] = "",
    seeds: options.Seeds = "0-2",
    ablation: Annotated[
        str, typer.Option(help="One of the paper's ablations: damping, inner, ema, warm-start, solver.")
    ] = "",
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting with one value or several: --set llqr.every=50,100. Again for a grid."),
    ] = None,
    jobs: options.Jobs = CORES,
    data: options.Data = None,
    runs: options.Runs = Path("runs"),
    device: options.Device = "auto",
    known: Annotated[
        Path | None, typer.Option(help="What this file of results has, at these settings, is done.")
    ] = None,
    dry: Annotated[bool, typer.Option("--dry-run", help="Print what would be run, and exit.")] = False,
) -> None:
    """Many runs: methods, seeds and settings, in parallel; what is done is skipped, what was stopped goes on."""
    from llqr_lab.experiments.sweep import planned_runs
    from llqr_lab.experiments.sweep import sweep as run_all

    chosen = planned_runs(presets, scale, name_list(methods), seed_list(seeds), ablation, changes or [])
    if dry:
        for config in chosen:
            typer.echo(f"{config.preset} {config.scale} {config.label} seed {config.seed}")
    elif not run_all(chosen, runs, data, jobs, device, known):
        raise typer.Exit(1)


@command(app)
def table(
    sources: options.Sources = None,
    presets: Annotated[
        str, typer.Option(help="Only presets whose name has this in it, or one of several with commas.")
    ] = "",
    scale: Annotated[str, typer.Option(help="Only this scale: paper, mini, cpu or smoke.")] = "",
    save: Annotated[
        Path | None, typer.Option(callback=writable_file, help="Keep the results and curves in this JSON file too.")
    ] = None,
    page: options.Page = None,
) -> None:
    """Results beside the paper's: mean and standard error over seeds, and time relative to the base.

    Of a run that is in several sources, the last one's counts.
    """
    from rich.console import Console

    from llqr_lab.experiments.collect import save as save_results
    from llqr_lab.experiments.collect import selected_results
    from llqr_lab.experiments.table import COMMAND, body, show
    from llqr_lab.results import write_page

    results = selected_results(sources or [Path("runs")], presets, scale)
    if save:
        save_results(results, save)
    if page:
        write_page(page, COMMAND, body(results))
    show(results, Console())


@command(app)
def figure(
    kind: Annotated[
        str, typer.Argument(help="curves, grokking, or an ablation: damping, inner, ema, warm-start, solver.")
    ],
    presets: Annotated[
        list[str] | None,
        typer.Argument(metavar="PRESET...", help="Of an ablation one; of curves one, or several with a panel each."),
    ] = None,
    methods: Annotated[str, typer.Option(help="Only these methods, with commas between.")] = "",
    source: Annotated[
        list[Path] | None, typer.Option(help="The folder of runs, or a file of results. Again for more.")
    ] = None,
    scale: options.Scale = "cpu",
    output: options.Picture = Path("figure.png"),
) -> None:
    """Draw training curves with standard errors, box plots of grokking, or an ablation."""
    from llqr_lab.figures.experiments import draw

    draw(kind, presets or [], name_list(methods), source or [Path("runs")], scale, output)
    typer.echo(f"Wrote {output}")


@command(app)
def report(
    sources: options.Sources = None,
    output: Annotated[Path, typer.Option("--output", "-o", callback=writable_file, help="The page to write.")] = Path(
        "report.html"
    ),
) -> None:
    """Runs as one page that needs nothing else: settings, curves, tables beside the paper's, where the time went."""
    from llqr_lab.report.page import write_report

    typer.echo(write_report(sources or [Path("runs")], output))


# benchmarks


@command(bench, "exact-training")
def exact_training(
    output: options.Output = Path("results/exact_training.json"),
    figure: options.Picture = Path("results/exact_training.png"),
    pages: Annotated[
        Path | None, typer.Option(help="A folder for the figures of the example pages too: docs/figures.")
    ] = None,
    seed: options.Seed = 0,
    share: Annotated[float, typer.Option(min=0.001, max=1, help="This share of the time, to see that it works.")] = 1.0,
) -> None:
    """Small networks fitted by exact steps, Adam, L-BFGS and SOAP: error by seconds; what an exact step costs (15 minutes)."""
    from llqr_lab.bench.exact_training import main

    main(output, figure, pages, seed, share)


@command(bench)
def engine(
    output: options.Output = Path("results/engine.json"),
    seed: options.Seed = 0,
    repeats: options.Repeats = 9,
    quick: Annotated[bool, typer.Option("--quick", help="Small batches, to see that it works.")] = False,
) -> None:
    """Curvature products and fits in units of a training step of the same network."""
    from llqr_lab.bench import cost

    cost.engine(output, seed, repeats, quick)


@command(bench)
def memory(
    networks: Annotated[
        list[str] | None, typer.Argument(help="pyramidnet110, resnet50 (the two unless named), or tiny.")
    ] = None,
    output: options.Output = Path("results/memory.json"),
    seed: options.Seed = 0,
) -> None:
    """Peak memory of a curvature product: of a batch whole, in chunks of examples, and in segments of layers."""
    from llqr_lab.bench import cost

    check_names(networks or [], cost.CUT, "network")
    cost.memory(networks or ["pyramidnet110", "resnet50"], output, seed)


@command(bench)
def race(
    tasks: Annotated[list[str] | None, typer.Argument(help="Tasks; else all of them.")] = None,
    optimizers: Annotated[str, typer.Option(help="Some of the optimizers, with commas between; else all.")] = "",
    scale: options.Scale = "cpu",
    seeds: options.Seeds = "0-2",
    runs: options.Runs = Path("runs"),
    data: options.Data = None,
    jobs: options.Jobs = CORES,
    output: options.Output = Path("results/race.json"),
    figure: options.Picture = Path("results/race.png"),
    page: options.Page = None,
    untuned: Annotated[
        bool, typer.Option("--untuned", help="LLQR has no rates of its own: it runs at its base's best only.")
    ] = False,
    steps: Annotated[int | None, typer.Option(min=50, help="Steps of each course, in place of its own.")] = None,
) -> None:
    """SGDM, AdamW, Muon, SOAP, Shampoo, SINGD, and LLQR on three of them: each at its best rate, and LLQR at its base's."""
    from llqr_lab.bench.race import COURSES, ENTRIES, main

    chosen = name_list(optimizers)
    check_names(tasks or [], COURSES, "task of the race")
    check_names(chosen, [entry.name for entry in ENTRIES], "optimizer in the race")
    for name in chosen if untuned else []:
        if name.removeprefix("LLQR on ") not in chosen:
            raise ConfigError(f"with --untuned, '{name}' runs at its base's best rate: name the base too")
    tasks = tasks or list(COURSES)
    main(tasks, chosen, scale, seed_list(seeds), runs, data, jobs, output, figure, page, untuned, steps)


@command(bench)
def sizes(
    scale: options.Scale = "cpu",
    seeds: options.Seeds = "0-2",
    runs: options.Runs = Path("runs"),
    data: options.Data = None,
    jobs: options.Jobs = CORES,
    output: options.Output = Path("results/sizes.json"),
    figure: options.Picture = Path("results/sizes.png"),
    page: options.Page = None,
) -> None:
    """How LLQR's gain goes with the batch (32 to 2,048), and with the width and the depth of a network (an hour)."""
    from llqr_lab.bench.sizes import main

    main(scale, seed_list(seeds), runs, data, jobs, output, figure, page)


@command(bench)
def unseen(
    tasks: Annotated[list[str] | None, typer.Argument(help="Tasks; else all of them.")] = None,
    seeds: options.Seeds = "0",
    steps: Annotated[int, typer.Option(min=10, help="Steps of a run.")] = 300,
    data: options.Data = None,
    jobs: options.Jobs = CORES,
    output: options.Output = Path("results/unseen.json"),
    page: options.Page = None,
) -> None:
    """Tasks that nothing was chosen by: LLQR over its base at a third, one and three times the base's best rate."""
    from llqr_lab.bench.unseen import UNSEEN, main

    check_names(tasks or [], UNSEEN, "unseen task")
    main(tasks or list(UNSEEN), seed_list(seeds), steps, data, jobs, output, page)


@command(bench)
def overhead(
    networks: Annotated[list[str] | None, typer.Argument(help="gpt, resnet18, convnet, mlp; else all of them.")] = None,
    output: options.Output = Path("results/overhead.json"),
    seed: options.Seed = 0,
    repeats: options.Repeats = 3,
    steps: Annotated[int | None, typer.Option(min=2, help="Steps that are timed; else 60, of resnet18 12.")] = None,
) -> None:
    """The time of a whole training with LLQR, refits included, nothing set, over that of its base alone."""
    from llqr_lab.bench import cost

    check_names(networks or [], cost.TRAINED, "network")
    cost.overhead(networks or list(cost.TRAINED), output, seed, repeats, steps)
