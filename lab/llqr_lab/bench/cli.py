"""The commands `llqr bench …`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from llqr_lab import options
from llqr_lab.errors import ConfigError, check_names
from llqr_lab.options import command, name_list, seed_list

Repeats = Annotated[int, typer.Option(min=1, help="Rounds; medians are reported.")]

bench = typer.Typer(name="bench", no_args_is_help=True, help="Measure the methods against each other.")


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
    repeats: Repeats = 9,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny networks, to see that it works.")] = False,
) -> None:
    """Curvature products and fits in units of a training step of the same network."""
    from llqr_lab.bench.engine import main

    main(output, seed, repeats, quick)


@command(bench)
def memory(
    networks: Annotated[
        list[str] | None, typer.Argument(help="pyramidnet110, resnet50 (the two unless named), or tiny.")
    ] = None,
    output: options.Output = Path("results/memory.json"),
    seed: options.Seed = 0,
) -> None:
    """Peak memory of a curvature product: of a batch whole, in chunks of examples, and in segments of layers."""
    from llqr_lab.bench.memory import SUBJECTS, main

    check_names(networks or [], SUBJECTS, "network")
    main(networks or ["pyramidnet110", "resnet50"], output, seed)


@command(bench)
def race(
    tasks: Annotated[list[str] | None, typer.Argument(help="Tasks; else all of them.")] = None,
    optimizers: Annotated[str, typer.Option(help="Some of the optimizers, with commas between; else all.")] = "",
    scale: options.Scale = "cpu",
    seeds: options.Seeds = "0-2",
    runs: options.Runs = Path("runs"),
    data: options.Data = None,
    jobs: options.Jobs = None,
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
    at_a_time, tasks = jobs or os.cpu_count() or 1, tasks or list(COURSES)
    main(tasks, chosen, scale, seed_list(seeds), runs, data, at_a_time, output, figure, page, untuned, steps)


@command(bench)
def sizes(
    scale: options.Scale = "cpu",
    seeds: options.Seeds = "0-2",
    runs: options.Runs = Path("runs"),
    data: options.Data = None,
    jobs: options.Jobs = None,
    output: options.Output = Path("results/sizes.json"),
    figure: options.Picture = Path("results/sizes.png"),
    page: options.Page = None,
) -> None:
    """How LLQR's gain goes with the batch (32 to 2,048), and with the width and the depth of a network (an hour)."""
    from llqr_lab.bench.sizes import main

    main(scale, seed_list(seeds), runs, data, jobs or os.cpu_count() or 1, output, figure, page)


@command(bench)
def unseen(
    tasks: Annotated[list[str] | None, typer.Argument(help="Tasks; else all of them.")] = None,
    seeds: options.Seeds = "0",
    steps: Annotated[int, typer.Option(min=10, help="Steps of a run.")] = 300,
    data: options.Data = None,
    jobs: options.Jobs = None,
    output: options.Output = Path("results/unseen.json"),
    page: options.Page = None,
) -> None:
    """Tasks that nothing was chosen by: LLQR over its base at a third, one and three times the base's best rate."""
    from llqr_lab.bench.unseen import UNSEEN, main

    check_names(tasks or [], UNSEEN, "unseen task")
    main(tasks or list(UNSEEN), seed_list(seeds), steps, data, jobs or os.cpu_count() or 1, output, page)


@command(bench)
def overhead(
    networks: Annotated[list[str] | None, typer.Argument(help="gpt, resnet18, convnet, mlp; else all of them.")] = None,
    output: options.Output = Path("results/overhead.json"),
    seed: options.Seed = 0,
    repeats: Repeats = 3,
    steps: Annotated[int | None, typer.Option(min=2, help="Steps of a run; else 400, of resnet18 12.")] = None,
) -> None:
    """The time of a whole training with LLQR, refits included, nothing set, over that of its base alone."""
    from llqr_lab.bench.overhead import SUBJECTS, main

    check_names(networks or [], SUBJECTS, "network")
    main(networks or list(SUBJECTS), output, seed, repeats, steps)
