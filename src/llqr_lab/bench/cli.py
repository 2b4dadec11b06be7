"""The commands `llqr bench …`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from llqr_lab.options import Data, Device, Scale, Seed, writable_file, writable_picture

Seeds = Annotated[str, typer.Option(help="Such as 0-2; learning rates are chosen with the first.")]
Runs = Annotated[Path, typer.Option(help="The folder of runs; what is there isn't repeated.")]
Jobs = Annotated[int | None, typer.Option(min=1, help="Runs at a time; else one a core.")]
Page = Annotated[
    Path | None, typer.Option(help="Write the tables into this page too, between its marks: docs/benchmarks.md.")
]

bench = typer.Typer(name="bench", no_args_is_help=True, help="Measure the methods against each other.")


@bench.command("epoch")
def bench_epoch(
    preset: Annotated[str, typer.Argument(help="A preset (llqr train --list).")] = "cifar10-resnet18-sgdm",
    scale: Scale = "paper",
    methods: Annotated[str, typer.Option(help="Methods, with commas between.")] = "diagonal-ngd,kfac-ngd,ekfac-ngd",
    output: Annotated[
        Path | None, typer.Option(help="The JSON file to write; else results/epoch_PRESET_SCALE.json.")
    ] = None,
    data: Data = None,
    seed: Seed = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; medians are reported.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch; else its own choice.")] = None,
    device: Device = "auto",
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Change a setting: --set batch=32. Give it again for more.")
    ] = None,
) -> None:
    """The time of an epoch with LLQR over one without it, from steps and refits timed in turns, beside the paper's."""
    from llqr_lab.experiments.cli import told
    from llqr_lab.experiments.presets import known_preset

    with told():
        known_preset(preset)
        target = writable_file(output or Path(f"results/epoch_{preset}_{scale}.json"))
        from llqr_lab.bench.epoch import main

        main(
            preset,
            scale,
            tuple(methods.split(",")),
            target,
            data,
            seed,
            repeats,
            threads,
            device,
            changes or [],
        )


@bench.command("exact")
def bench_exact(
    output: Annotated[Path, typer.Option(callback=writable_file, help="The JSON file to write.")] = Path(
        "results/exact.json"
    ),
    figure: Annotated[Path, typer.Option(callback=writable_picture, help="The figure to write.")] = Path(
        "results/exact.png"
    ),
    seed: Seed = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Timed repetitions of each size; medians are reported.")] = 7,
    quick: Annotated[bool, typer.Option("--quick", help="A few small sizes, to see that it works.")] = False,
) -> None:
    """The exact step by the Riccati recursion against the dense matrix: seconds and peak memory."""
    from llqr_lab.bench.exact import main

    main(output, figure, seed, repeats, quick)


@bench.command("exact-training")
def bench_exact_training(
    output: Annotated[
        Path, typer.Option(callback=writable_file, help="The JSON file; what is in it isn't repeated.")
    ] = Path("results/exact_training.json"),
    figure: Annotated[Path, typer.Option(callback=writable_picture, help="The figure to write.")] = Path(
        "results/exact_training.png"
    ),
    pages: Annotated[
        Path | None, typer.Option(help="A folder for the figures of the example pages too: docs/figures.")
    ] = None,
    seed: Seed = 0,
    share: Annotated[float, typer.Option(min=0.001, max=1, help="This share of the time, to see that it works.")] = 1.0,
) -> None:
    """Small networks fitted by exact steps, Adam, L-BFGS and SOAP: error by seconds; what an exact step costs (15 minutes)."""
    from llqr_lab.exact_training.bench import main

    main(output, figure, pages, seed, share)


@bench.command("engine")
def bench_engine(
    output: Annotated[Path, typer.Option(callback=writable_file, help="The JSON file to write.")] = Path(
        "results/engine.json"
    ),
    figure: Annotated[Path, typer.Option(callback=writable_picture, help="The figure to write.")] = Path(
        "results/engine.png"
    ),
    seed: Seed = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; medians are reported.")] = 9,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny networks, to see that it works.")] = False,
) -> None:
    """Curvature products and fits in units of a training step of the same network: seconds, memory, growth."""
    from llqr_lab.bench.engine import main

    main(output, figure, seed, repeats, quick)


@bench.command("memory")
def bench_memory(
    networks: Annotated[
        list[str] | None, typer.Argument(help="pyramidnet110, resnet50 (the two unless named), or tiny.")
    ] = None,
    output: Annotated[Path, typer.Option(callback=writable_file, help="The JSON file to write.")] = Path(
        "results/memory.json"
    ),
    seed: Seed = 0,
) -> None:
    """Peak memory of a curvature product: of a batch whole, in chunks of examples, and in segments of layers."""
    from llqr_lab.experiments.cli import told
    from llqr_lab.experiments.config import ConfigError
    from llqr_lab.suggest import suggestion

    with told():
        from llqr_lab.bench.memory import SUBJECTS, main

        for name in networks or []:
            if name not in SUBJECTS:
                raise ConfigError(f"no network is called '{name}'{suggestion(name, SUBJECTS)}")
        main(networks or ["pyramidnet110", "resnet50"], output, seed)


@bench.command("report")
def bench_report(
    output: Annotated[Path, typer.Option(callback=writable_file, help="The JSON file to write.")] = Path(
        "results/report.json"
    ),
    runs: Annotated[int, typer.Option(min=1, help="Runs that are made up.")] = 200,
    points: Annotated[int, typer.Option(min=1, help="Evaluations of each.")] = 100_000,
    seed: Seed = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Times that the page is opened; medians are reported.")] = 3,
) -> None:
    """The report of many long runs: seconds to make it and to open it in Chromium, memory, size (some GB of files)."""
    from llqr_lab.experiments.cli import told

    with told():
        from llqr_lab.bench.report import main

        main(output, runs, points, seed, repeats)


@bench.command("ranks")
def bench_ranks(
    output: Annotated[Path, typer.Option(callback=writable_file, help="The JSON file to write.")] = Path(
        "results/ranks.json"
    ),
    ranks: Annotated[list[int] | None, typer.Option(min=2, help="Processes; give it again for more. Else 2.")] = None,
    width: Annotated[int, typer.Option(min=1, help="Of the layers of the network.")] = 512,
    seed: Seed = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; medians are reported.")] = 15,
) -> None:
    """A step on several processes, with U whole on each and divided among them: seconds and memory."""
    from llqr_lab.bench.ranks import main

    main(output, ranks or [2], width, seed, repeats)


@bench.command("race")
def bench_race(
    tasks: Annotated[list[str] | None, typer.Argument(help="Tasks; else all of them.")] = None,
    optimizers: Annotated[str, typer.Option(help="Some of the optimizers, with commas between; else all.")] = "",
    scale: Scale = "cpu",
    seeds: Seeds = "0-2",
    runs: Runs = Path("runs"),
    data: Data = None,
    jobs: Jobs = None,
    output: Annotated[Path, typer.Option(callback=writable_file, help="The JSON file to write.")] = Path(
        "results/race.json"
    ),
    figure: Annotated[Path, typer.Option(callback=writable_picture, help="The figure to write.")] = Path(
        "results/race.png"
    ),
    page: Page = None,
    untuned: Annotated[
        bool, typer.Option("--untuned", help="LLQR has no rates of its own: it runs at its base's best only.")
    ] = False,
) -> None:
    """SGDM, AdamW, Muon, SOAP, Shampoo, SINGD, and LLQR on three of them: each at its best rate, and LLQR at its base's."""
    from llqr_lab.experiments.cli import numbers, told
    from llqr_lab.experiments.config import ConfigError
    from llqr_lab.race.entries import COURSES, ENTRIES
    from llqr_lab.suggest import suggestion

    with told():
        chosen = [each.strip() for each in optimizers.split(",") if each.strip()]
        for given, known, what in (
            (tasks or [], list(COURSES), "task"),
            (chosen, [e.name for e in ENTRIES], "optimizer"),
        ):
            for name in given:
                if name not in known:
                    raise ConfigError(f"there is no {what} '{name}' in the race{suggestion(name, known)}")
        for name in chosen if untuned else []:
            if name.removeprefix("LLQR on ") not in chosen:
                raise ConfigError(f"with --untuned, '{name}' runs at its base's best rate: name the base too")
        from llqr_lab.bench.race import main

        at_a_time, names = jobs or os.cpu_count() or 1, tasks or list(COURSES)
        main(names, chosen, scale, numbers(seeds), runs, data, at_a_time, output, figure, page, untuned)


@bench.command("unseen")
def bench_unseen(
    tasks: Annotated[list[str] | None, typer.Argument(help="Tasks; else all of them.")] = None,
    seeds: Annotated[str, typer.Option(help="Such as 0-2; learning rates are chosen with the first.")] = "0",
    steps: Annotated[int, typer.Option(min=10, help="Steps of a run.")] = 300,
    runs: Runs = Path("runs"),
    data: Data = None,
    jobs: Jobs = None,
    output: Annotated[Path, typer.Option(callback=writable_file, help="The JSON file to write.")] = Path(
        "results/unseen.json"
    ),
    page: Page = None,
) -> None:
    """Tasks that nothing was chosen by: LLQR over its base at a third, one and three times the base's best rate."""
    from llqr_lab.experiments.cli import numbers, told
    from llqr_lab.experiments.config import ConfigError
    from llqr_lab.suggest import suggestion

    with told():
        from llqr_lab.bench.unseen import main
        from llqr_lab.race.unseen import UNSEEN

        for name in tasks or []:
            if name not in UNSEEN:
                raise ConfigError(f"there is no unseen task '{name}'{suggestion(name, UNSEEN)}")
        main(tasks or list(UNSEEN), numbers(seeds), steps, runs, data, jobs or os.cpu_count() or 1, output, page)


@bench.command("overhead")
def bench_overhead(
    networks: Annotated[list[str] | None, typer.Argument(help="gpt, resnet18, convnet, mlp; else all of them.")] = None,
    output: Annotated[Path, typer.Option(callback=writable_file, help="The JSON file to write.")] = Path(
        "results/overhead.json"
    ),
    seed: Seed = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each; medians are reported.")] = 3,
    steps: Annotated[int | None, typer.Option(min=2, help="Steps of a run; else 400, of resnet18 12.")] = None,
) -> None:
    """The time of a whole training with LLQR, refits included, nothing set, over that of its base alone."""
    from llqr_lab.experiments.cli import told
    from llqr_lab.experiments.config import ConfigError
    from llqr_lab.suggest import suggestion

    with told():
        from llqr_lab.bench.overhead import SUBJECTS, main

        for name in networks or []:
            if name not in SUBJECTS:
                raise ConfigError(f"no network is called '{name}'{suggestion(name, SUBJECTS)}")
        main(networks or list(SUBJECTS), output, seed, repeats, steps)
