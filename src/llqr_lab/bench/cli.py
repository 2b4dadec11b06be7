"""The commands `llqr bench …`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from llqr_lab.options import Data, Scale, Seed, known_networks, writable_file, writable_picture

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
            changes or [],
        )


@bench.command("exact")
def bench_exact(
    output: Annotated[Path, typer.Option(callback=writable_file, help="The JSON file to write.")] = Path(
        "results/exact.json"
    ),
    figure: Annotated[Path, typer.Option(callback=writable_picture, help="The figure to write.")] = Path(
        "docs/figures/bench_exact.png"
    ),
    seed: Seed = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Timed repetitions of each size; medians are reported.")] = 7,
    quick: Annotated[bool, typer.Option("--quick", help="A few small sizes, to see that it works.")] = False,
) -> None:
    """The exact step by the Riccati recursion against the dense matrix: seconds and peak memory."""
    from llqr_lab.bench.exact import main

    main(output, figure, seed, repeats, quick)


@bench.command("engine")
def bench_engine(
    output: Annotated[Path, typer.Option(callback=writable_file, help="The JSON file to write.")] = Path(
        "results/engine.json"
    ),
    figure: Annotated[Path, typer.Option(callback=writable_picture, help="The figure to write.")] = Path(
        "docs/figures/bench_engine.png"
    ),
    seed: Seed = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; medians are reported.")] = 9,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny networks, to see that it works.")] = False,
) -> None:
    """Curvature products and fits in units of a training step of the same network: seconds, memory, growth."""
    from llqr_lab.bench.engine import main

    main(output, figure, seed, repeats, quick)


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


@bench.command("step")
def bench_step(
    output: Annotated[Path, typer.Option(callback=writable_file, help="The JSON file to write.")] = Path(
        "results/step.json"
    ),
    figure: Annotated[Path, typer.Option(callback=writable_picture, help="The figure to write.")] = Path(
        "docs/figures/bench_step.png"
    ),
    networks: Annotated[
        list[str] | None,
        typer.Option(
            callback=known_networks, help="A network; give it again for more. Else mlp, resnet18, transformer."
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=2, help="Examples in a batch.")] = 128,
    seed: Seed = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds, more where steps are short; medians are reported.")] = 7,
) -> None:
    """What LLQR adds to a training step between refits, over the base optimizer alone, by structure."""
    from llqr_lab.bench.step import DEFAULT, main

    main(output, figure, tuple(networks or DEFAULT), batch, seed, repeats)


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
        "docs/figures/race.png"
    ),
    page: Page = None,
) -> None:
    """Optimizers side by side: SGDM, AdamW, Muon, SOAP, Shampoo, SINGD, and LLQR on three of them, each at its best rate."""
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
        from llqr_lab.bench.race import main

        at_a_time = jobs or os.cpu_count() or 1
        main(tasks or list(COURSES), chosen, scale, numbers(seeds), runs, data, at_a_time, output, figure, page)


@bench.command("ideas")
def bench_ideas(
    tasks: Annotated[list[str] | None, typer.Argument(help="Tasks of the race; else two of them.")] = None,
    scale: Scale = "cpu",
    seeds: Seeds = "0-2",
    runs: Runs = Path("runs"),
    data: Data = None,
    jobs: Jobs = None,
    output: Annotated[Path, typer.Option(callback=writable_file, help="The JSON file to write.")] = Path(
        "results/ideas.json"
    ),
    page: Page = None,
) -> None:
    """LLQR as it races on SGDM, and the same with one thing changed: structure, solver, sample, schedule, trust."""
    from llqr_lab.experiments.cli import numbers, told
    from llqr_lab.experiments.config import ConfigError
    from llqr_lab.race.entries import COURSES
    from llqr_lab.race.ideas import TASKS
    from llqr_lab.suggest import suggestion

    with told():
        known = [name for name, course in COURSES.items() if course.reached == "train_loss"]
        for name in tasks or []:
            if name not in known:
                raise ConfigError(f"there is no task '{name}' with a training loss to reach{suggestion(name, known)}")
        from llqr_lab.bench.ideas import main

        main(tasks or list(TASKS), scale, numbers(seeds), runs, data, jobs or os.cpu_count() or 1, output, page)


@bench.command("target")
def bench_target(
    suite: Annotated[str, typer.Argument(help="What to compare: solvers, or modes (of a refit).")] = "solvers",
    output: Annotated[
        Path | None, typer.Option(help="The JSON file to write; runs that are in it aren't repeated.")
    ] = None,
    figure: Annotated[Path | None, typer.Option(help="The figure to write.")] = None,
    data: Annotated[Path | None, typer.Option(help="The folder with data sets; else LLQR_DATA.")] = None,
    seed: Seed = 0,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, from --seed on.")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="A few steps on digits, to see that it works.")] = False,
) -> None:
    """Steps and seconds to a training loss: LLQR against its base at the same learning rate."""
    output = writable_file(output or Path(f"results/target_{suite}.json"))
    figure = writable_picture(figure or Path(f"docs/figures/target_{suite}.png"))
    from llqr_lab.bench.target import main
    from llqr_lab.data.folder import DataError
    from llqr_lab.race.methods import SUITES

    if suite not in SUITES:
        raise typer.BadParameter(f"'{suite}' is none of {', '.join(SUITES)}", param_hint="SUITE")
    try:
        main(suite, output, figure, data, seed, seeds, quick)
    except DataError as error:
        raise typer.BadParameter(str(error), param_hint="--data") from None
