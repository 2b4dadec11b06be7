"""Promise: every use of a weight as a linear map is found, and what is told of it is what the weight's gradient is made of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from llqr import LLQR
from llqr.curvature import statistics
from llqr.curvature.linear_maps import LinearMap
from llqr.curvature.recorder import unfused
from llqr.curvature.statistics import Sides, Sums, merged, some_places
from llqr.curvature.uses import Found, find_uses
from llqr.structures import Dense, Kronecker

BATCH = 3


class Own(nn.Module):
    """A module of some parameters and a function of them and the input."""

    def __init__(self, run: Callable[[Own, Tensor], Tensor], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class First(nn.Module):
    """The first thing that another module returns."""

    def __init__(self, inner: nn.Module, cross: bool = False) -> None:
        super().__init__()
        self.inner, self.cross = inner, cross

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.inner, nn.MultiheadAttention):
            other = x.sin() if self.cross else x
            return self.inner(x, other, other, need_weights=False)[0]
        return self.inner(x)[0]


class Chain(nn.Module):
    """Two linear layers with something between them, under a checkpoint if asked for."""

    def __init__(self, between: nn.Module, checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 5), between, nn.Linear(5, 4), between, nn.Linear(4, 2))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layers, x, use_reentrant=False) if self.checkpointed else self.layers(x)


def vectors(*between: int, size: int = 4) -> Tensor:
    return torch.randn(BATCH, *between, size)


Case = tuple[Callable[[], nn.Module], Callable[[], Tensor]]

CASES: dict[str, Case] = {
    "linear": (lambda: nn.Linear(4, 3), vectors),
    "linear of 3d": (lambda: nn.Linear(4, 3), lambda: vectors(5)),
    "linear of 4d without bias": (lambda: nn.Linear(4, 3, bias=False), lambda: vectors(2, 3)),
    "F.linear": (lambda: Own(lambda m, x: functional.linear(x, m.w, m.b), w=(3, 4), b=(3,)), vectors),
    "a scaled bias": (lambda: Own(lambda m, x: functional.linear(x, m.w, 2 * m.b), w=(3, 4), b=(3,)), vectors),
    "linear of a transposed input": (
        lambda: Own(lambda m, x: functional.linear(x.transpose(0, 1), m.w, m.b), w=(3, 4), b=(3,)),
        lambda: vectors(5),
    ),
    "x @ W + b": (lambda: Own(lambda m, x: m.b + x @ m.w, w=(4, 3), b=(3,)), vectors),
    "W @ x + b": (lambda: Own(lambda m, x: (m.w @ x.T) + m.b, w=(3, 4), b=(3,)), vectors),  # along the places
    "an outer sum": (lambda: Own(lambda m, x: (x @ m.w.T).view(-1, 3, 1) + m.b, w=(3, 4), b=(3,)), vectors),
    "x @ W + b twice": (lambda: Own(lambda m, x: (y := x @ m.w) * (y + m.b), w=(4, 3), b=(3,)), vectors),
    "x @ W": (lambda: Own(lambda m, x: x @ m.w, w=(4, 3)), vectors),
    "x @ W of 3d": (lambda: Own(lambda m, x: x @ m.w, w=(4, 3)), lambda: vectors(5)),
    "x @ W.T": (lambda: Own(lambda m, x: x @ m.w.T, w=(3, 4)), vectors),
    "W @ x": (lambda: Own(lambda m, x: m.w @ x.T, w=(3, 4)), vectors),
    "W @ x of 3d": (lambda: Own(lambda m, x: m.w @ x.mT, w=(3, 4)), lambda: vectors(5)),
    "W.T @ x": (lambda: Own(lambda m, x: m.w.t() @ x.T, w=(4, 3)), vectors),
    "addmm, weight (in, out)": (lambda: Own(lambda m, x: torch.addmm(m.b, x, m.w), w=(4, 3), b=(3,)), vectors),
    "addmm with alpha": (lambda: Own(lambda m, x: torch.addmm(m.b, x, m.w, alpha=2.0), w=(4, 3), b=(3,)), vectors),
    "addmm with beta": (lambda: Own(lambda m, x: torch.addmm(m.b, x, m.w, beta=0.5), w=(4, 3), b=(3,)), vectors),
    "bmm by head": (lambda: Own(lambda m, x: x.transpose(0, 1) @ m.w, w=(2, 4, 3)), lambda: vectors(2)),
    "baddbmm": (
        lambda: Own(lambda m, x: torch.baddbmm(m.b, x.unflatten(1, (2, 4)).transpose(0, 1), m.w), w=(2, 4, 3), b=(2, 1, 3)),
        lambda: vectors(size=8),
    ),
    "einsum": (lambda: Own(lambda m, x: torch.einsum("bti,io->bto", x, m.w), w=(4, 3)), lambda: vectors(5)),
    "einsum by head": (lambda: Own(lambda m, x: torch.einsum("bti,hoi->bhto", x, m.w), w=(2, 3, 4)), lambda: vectors(5)),
    "einsum of experts": (lambda: Own(lambda m, x: torch.einsum("bei,eio->beo", x, m.w), w=(2, 4, 3)), lambda: vectors(2)),
    "by head, for every example": (lambda: Own(lambda m, x: x @ m.w, w=(2, 4, 3)), lambda: vectors(2, 5)),
    "W x by head": (lambda: Own(lambda m, x: m.w @ x.mT, w=(2, 3, 4)), lambda: vectors(2, 5)),
    "x W.mT by head": (lambda: Own(lambda m, x: x @ m.w.mT, w=(2, 3, 4)), lambda: vectors(2, 5)),
    "x @ W.transpose": (lambda: Own(lambda m, x: x @ m.w.transpose(0, 1), w=(4, 4)), vectors),
    "x @ W.permute": (lambda: Own(lambda m, x: x @ m.w.permute(1, 0), w=(4, 4)), vectors),
    "one head, for every example": (lambda: Own(lambda m, x: x @ m.w[1] + x @ m.w[0], w=(2, 4, 4)), lambda: vectors(2, 5)),
    "expanded": (lambda: Own(lambda m, x: torch.bmm(x, m.w.expand(BATCH, 4, 3)), w=(4, 3)), lambda: vectors(5)),
    "slices of one": (lambda: Own(lambda m, x: (x @ m.w[:, :3]).tanh() @ m.w[:3, 3:].T, w=(4, 6)), vectors),
    "chunks of one": (lambda: Own(lambda m, x: torch.cat([(x @ p).sin() for p in m.w.chunk(2, 1)]), w=(4, 6)), vectors),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), lambda: torch.randn(BATCH, 4, 9)),
    "conv1d same": (lambda: nn.Conv1d(4, 6, 3, padding="same", dilation=2, groups=2), lambda: torch.randn(BATCH, 4, 9)),
    "conv1d without a batch": (lambda: nn.Conv1d(4, 6, 3), lambda: torch.randn(4, 9)),
    "conv2d": (
        lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2),
        lambda: torch.randn(BATCH, 4, 7, 6),
    ),
    "conv2d by channel": (lambda: nn.Conv2d(4, 4, 3, groups=4, bias=False), lambda: torch.randn(BATCH, 4, 5, 5)),
    "conv2d reflected": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), lambda: torch.randn(BATCH, 2, 5, 5)),
    "conv2d 1 x 1": (lambda: nn.Conv2d(2, 3, 1), lambda: torch.randn(BATCH, 2, 4, 4)),
    "conv3d": (lambda: nn.Conv3d(2, 4, 2, stride=2, padding=1, groups=2), lambda: torch.randn(BATCH, 2, 3, 4, 3)),
    "transposed conv1d": (
        lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        lambda: torch.randn(BATCH, 4, 5),
    ),
    "transposed conv2d": (
        lambda: nn.ConvTranspose2d(4, 2, 3, stride=2, dilation=2, output_padding=1, bias=False),
        lambda: torch.randn(BATCH, 4, 3, 4),
    ),
    "attention": (lambda: First(nn.MultiheadAttention(4, 2, batch_first=True)), lambda: vectors(5)),
    "attention, batch second": (lambda: First(nn.MultiheadAttention(4, 2)), lambda: vectors(5)),
    "cross attention": (lambda: First(nn.MultiheadAttention(4, 2), cross=True), lambda: vectors(5)),
    "lstm": (lambda: First(nn.LSTM(4, 3, num_layers=2)), lambda: torch.randn(5, BATCH, 4)),
    "lstm both ways": (lambda: First(nn.LSTM(4, 3, bidirectional=True, proj_size=2)), lambda: torch.randn(5, BATCH, 4)),
    "gru": (lambda: First(nn.GRU(4, 3, batch_first=True)), lambda: vectors(5)),
    "rnn": (lambda: First(nn.RNN(4, 3)), lambda: torch.randn(5, BATCH, 4)),
    "used twice": (lambda: Own(lambda m, x: (x @ m.w).tanh() @ m.w, w=(4, 4)), vectors),
    "tied transposed": (lambda: Own(lambda m, x: (x @ m.w).tanh() @ m.w.T, w=(4, 3)), vectors),
    "in place": (lambda: Chain(nn.ReLU(inplace=True)), vectors),
    "checkpointed": (lambda: Chain(nn.Tanh(), checkpointed=True), vectors),
}  # fmt: skip

BY_THE_BASE = {
    "x @ W + b twice": {"b"},
    "W @ x + b": {"b"},
    "an outer sum": {"b"},
    "a scaled bias": {"b"},
    "addmm with alpha": {"w", "b"},
    "addmm with beta": {"b"},
    "baddbmm": {"b"},
    "cross attention": {"inner.in_proj_bias"},  # cut up
    "transposed conv1d": {"bias"},
}
"""Parameters that aren't a part of a linear map as it is: their curvature isn't known."""


def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at every place where a map acts."""
    monkeypatch.setattr(statistics, "PLACES", 10**6)


def uses_of(model: nn.Module, output: Tensor, slope: Tensor) -> tuple[Found, list[tuple[LinearMap, Sides]]]:
    """Every use with its two sides, by one backward pass."""
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    found = find_uses([output], names)
    edges = [GradientEdge(use.node, 0) for use in found.uses]
    pulled = torch.autograd.grad(output, edges, slope, retain_graph=True) if edges else ()
    return found, [(use.map, use.sides(g)) for use, g in zip(found.uses, pulled, strict=True)]


def with_ones(map_: LinearMap, sides: Sides) -> tuple[Tensor, Tensor]:
    """The sides, with the 1 that a bias meets."""
    rows, columns, _ = sides
    if map_.bias is None:
        return rows, columns
    ones = rows.new_ones(*rows.shape[:2], 1)
    return (torch.cat((rows, ones), 2), columns) if map_.inputs_on_rows else (rows, torch.cat((columns, ones), 2))


@pytest.mark.parametrize("case", CASES)
def test_sums_of_outer_products_are_gradients(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Σ over places of rows ⊗ columns = ∂/∂W, for each kind of map, weights and biases."""
    everywhere(monkeypatch)
    make, inputs = CASES[case]
    model, x = make().double(), inputs().double()
    with unfused(model):
        output = model(x)
    slope = torch.randn_like(output)
    found, uses = uses_of(model, output, slope)
    assert not found.hidden
    parameters = dict(model.named_parameters())
    sums = {name: torch.zeros_like(p).contiguous() for name, p in parameters.items()}
    for map_, sides in uses:
        assert sides[2] == 1.0
        rows, columns = with_ones(map_, sides)
        weight, *bias = map_.split(rows.mT @ columns)
        part = torch.zeros_like(sums[map_.weight])
        map_.put(weight, part)
        sums[map_.weight] += part
        if map_.bias is not None:
            sums[map_.bias] += bias[0]
    by_the_base = BY_THE_BASE.get(case, set())
    assert by_the_base <= set(found.other_uses)
    assert {name for map_, _ in uses for name in map_.members} == set(parameters) - by_the_base
    truth = torch.autograd.grad(output, list(parameters.values()), slope)
    for (name, total), gradient in zip(sums.items(), truth, strict=True):
        if name not in by_the_base:
            torch.testing.assert_close(total, gradient, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("case", [name for name, (make, _) in CASES.items() if name not in BY_THE_BASE])
def test_reading_and_writing_are_inverse(case: str) -> None:
    """`read`, `split` and `put` of a map take numbers out of their parameter and put them back where they were."""
    make, inputs = CASES[case]
    model = make().double()
    with unfused(model):
        output = model(inputs().double())
    found, _ = uses_of(model, output, torch.ones_like(output))
    numbers = {name: torch.randn_like(p).contiguous() for name, p in model.named_parameters()}
    for use in found.uses:
        joined = use.map.read(numbers)
        assert tuple(joined.shape) == use.map.joined
        weight, *bias = use.map.split(joined)
        again = numbers[use.map.weight] + 1
        use.map.put(weight, again)
        assert int((again == numbers[use.map.weight]).sum()) == weight.numel()
        if use.map.bias is not None:
            assert torch.equal(bias[0], numbers[use.map.bias])


ONE_PLACE = ["linear", "x @ W", "addmm, weight (in, out)", "einsum of experts"]


@pytest.mark.parametrize("case", ONE_PLACE)
def test_second_moments_of_examples(case: str) -> None:
    """Σ_n vec(g_n) vec(g_n)ᵀ of the gradients that torch.func gives example by example, where one example is one place."""
    make, inputs = CASES[case]
    model, x = make().double(), inputs().double()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def value(tensors: dict[str, Tensor], example: Tensor) -> Tensor:
        return functional_call(model, tensors, (example[None],)).sin().sum()

    each = vmap(grad(value), in_dims=(None, 0))(parameters, x)
    output = model(x)
    _, [(map_, sides)] = uses_of(model, output, output.cos().detach())
    sums = Sums(map_, Dense())
    sums.add(sides)
    joined = vmap(map_.read)(each).flatten(2)
    torch.testing.assert_close(sums.tensors["whole"], torch.einsum("ngi,ngj->gij", joined, joined))


@pytest.mark.parametrize("case", ["linear of 3d", "conv2d", "transposed conv2d", "attention"])
def test_second_moments_of_places(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Σ over places of vec(b aᵀ) vec(b aᵀ)ᵀ: the gradients that torch.func gives one place of the output after another."""
    everywhere(monkeypatch)
    make, inputs = CASES[case]
    model, x = make().double(), inputs().double()
    output = model(x)
    slope = torch.randn_like(output)
    for map_, sides in uses_of(model, output, slope)[1]:
        rows, columns = with_ones(map_, sides)
        products = (rows[..., None] * columns[:, :, None]).flatten(2)
        sums = {"dense": Sums(map_, Dense()), "kronecker": Sums(map_, Kronecker())}
        for total in sums.values():
            total.add(sides)
        torch.testing.assert_close(sums["dense"].tensors["whole"], products.mT @ products)
        torch.testing.assert_close(sums["kronecker"].tensors["rows"], rows.mT @ rows)
        torch.testing.assert_close(sums["kronecker"].tensors["columns"], columns.mT @ columns)
    if case == "linear of 3d":
        parameters = {name: p.detach() for name, p in model.named_parameters()}

        def value(tensors: dict[str, Tensor], place: Tensor, weight: Tensor) -> Tensor:
            return (functional_call(model, tensors, (place[None],))[0] * weight).sum()

        each = vmap(grad(value), in_dims=(None, 0, 0))(parameters, x.flatten(0, 1), slope.flatten(0, 1))
        joined = vmap(map_.read)(each).flatten(2)
        torch.testing.assert_close(sums["dense"].tensors["whole"], torch.einsum("ngi,ngj->gij", joined, joined))


@pytest.mark.parametrize("case", ["conv1d same", "conv2d", "conv3d", "transposed conv1d"])
def test_columns_of_a_convolution_by_unfolding(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every place by itself: the gradient of one output number is b aᵀ with one row b that isn't zero."""
    everywhere(monkeypatch)
    make, inputs = CASES[case]
    model, x = make().double(), inputs().double()
    output = model(x)
    for index in torch.randperm(output.numel())[:8].tolist():
        slope = torch.zeros_like(output)
        slope.view(-1)[index] = 1.7
        _, [(map_, sides)] = uses_of(model, output, slope)
        (truth,) = torch.autograd.grad(output, model.get_parameter("weight"), slope, retain_graph=True)
        torch.testing.assert_close(sides[0].mT @ sides[1], map_.matrix(truth))


def test_places_of_a_kernel_are_those_of_its_own_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions one after another that differ in one thing each: Σ b aᵀ is the gradient of each."""
    everywhere(monkeypatch)
    torch.manual_seed(0)
    first = {"batch": 2, "size": 6, "kernel_size": 2, "stride": 3, "padding": 0, "dilation": 1}
    others = {"batch": 3, "size": 7, "kernel_size": 3, "stride": 4, "dilation": 2}, {"stride": 4, "padding": 1}
    changes = [{}, *({name: value} for name, value in others[0].items()), others[1], {"stride": 4}]
    for settings in [{**first, **change} for change in changes]:
        batch, size = settings.pop("batch"), settings.pop("size")
        model = nn.Conv2d(2, 3, bias=False, **settings).double()
        output = model(torch.randn(batch, 2, size, size).double())
        assert output.shape[2:] == (2, 2)
        slope = torch.randn_like(output)
        _, [(map_, sides)] = uses_of(model, output, slope)
        (truth,) = torch.autograd.grad(output, model.weight, slope)
        torch.testing.assert_close(sides[0].mT @ sides[1], map_.matrix(truth))


def test_a_transposed_weight_counts_on_both_sides() -> None:
    """Used as x W and as x Wᵀ: each side has the inputs of one use and the gradients of the other, at the same trace."""
    model = CASES["tied transposed"][0]().double()
    output = model(vectors().double())
    _, uses = uses_of(model, output, torch.randn_like(output))
    assert {map_.inputs_on_rows for map_, _ in uses} == {True, False}
    each = []
    for map_, sides in uses:
        each.append(Sums(map_, Kronecker()))
        each[-1].add(sides)
    total = merged(each)["w"].moments()
    rows = columns = torch.zeros((), dtype=torch.float64)
    for sums in each:
        parts = sums.moments()
        traces = {name: parts[name].diagonal(dim1=1, dim2=2).sum() for name in ("rows", "columns")}
        size = (traces["rows"] * traces["columns"]).sqrt()
        rows, columns = (
            rows + parts["rows"] * size / traces["rows"],
            columns + parts["columns"] * size / traces["columns"],
        )
    for name, truth in [("rows", rows), ("columns", columns)]:
        torch.testing.assert_close(total[name] / total[name].norm(), truth / truth.norm())


def test_uses_of_one_weight_are_added() -> None:
    """A is the mean over all places of both uses, G the sum."""
    model = CASES["used twice"][0]().double()
    x = vectors().double()
    output = model(x)
    slope = torch.randn_like(output)
    _, uses = uses_of(model, output, slope)
    assert len(uses) == 2
    sums = Sums(uses[0][0], Kronecker())
    for _, sides in uses:
        sums.add(sides)
    inside = (x @ model.w).tanh().detach()
    inputs = torch.cat((x, inside))
    gradients = torch.cat(((slope @ model.w.T) * (1 - inside**2), slope)).detach()
    torch.testing.assert_close(sums.moments()["rows"][0], inputs.T @ inputs / (2 * BATCH))
    torch.testing.assert_close(sums.moments()["columns"][0], gradients.T @ gradients)


def test_a_weight_used_both_ways_with_a_long_side() -> None:
    """As W and as Wᵀ, with a side beyond max_dim: its moment is the diagonal of what it would be."""
    model = Own(lambda m, x: (x @ m.w).tanh() @ m.w.T, w=(4, 3)).double()
    output = model(vectors().double())
    _, uses = uses_of(model, output, torch.randn_like(output))
    found = []
    for structure in (Kronecker(), Kronecker(max_dim=3)):
        each = [Sums(map_, structure) for map_, _ in uses]
        for sums, (_, sides) in zip(each, uses, strict=True):
            sums.add(sides)
        (joined,) = merged(each).values()
        found.append(joined.moments())
    full, short = found
    torch.testing.assert_close(short["rows"], full["rows"].diagonal(dim1=1, dim2=2))
    torch.testing.assert_close(short["columns"], full["columns"])


@pytest.mark.parametrize("case", ["slices of one", "chunks of one"])
def test_parts_of_one_weight(case: str) -> None:
    """Parts that don't overlap are maps of their own, each under its own key."""
    model = CASES[case][0]().double()
    output = model(vectors().double())
    _, uses = uses_of(model, output, torch.randn_like(output))
    each = [Sums(map_, Kronecker()) for map_, _ in uses]
    for sums, (_, sides) in zip(each, uses, strict=True):
        sums.add(sides)
    assert len({map_.key for map_, _ in uses}) == 2
    assert len(merged(each)) == 2


def test_parts_that_overlap_are_left_to_the_base() -> None:
    model = Own(lambda m, x: torch.cat((x @ m.w[:, :3], x @ m.w[:, 2:]), 1), w=(4, 5)).double()
    output = model(vectors().double())
    _, uses = uses_of(model, output, torch.randn_like(output))
    each = [Sums(map_, Kronecker()) for map_, _ in uses]
    for sums, (_, sides) in zip(each, uses, strict=True):
        sums.add(sides)
    assert merged(each) == {}


def test_tied_with_an_embedding() -> None:
    """Part of its gradient doesn't come from a linear map: the base steps it."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.inner, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7)
            self.head.weight = self.embedding.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.inner(self.embedding(x)).tanh())

    model = Tied().double()
    output = model(torch.randint(7, (BATCH, 5)))
    found, uses = uses_of(model, output, torch.randn_like(output))
    assert found.other_uses == {"embedding.weight": "EmbeddingBackward0", "head.bias": "EmbeddingBackward0"}
    assert [map_.weight for map_, _ in uses] == ["inner.weight"]


@pytest.mark.parametrize("frozen", ["0.weight", "0.bias", "2.weight", "2.bias"])
def test_frozen(frozen: str) -> None:
    """What has no gradient is no part of a map; its partner still is, a bias without its weight by the base."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    model.get_parameter(frozen).requires_grad_(False)
    output = model(vectors().double())
    found, uses = uses_of(model, output, torch.randn_like(output))
    members = {name for map_, _ in uses for name in map_.members}
    layer = frozen.partition(".")[0]
    left = {f"{layer}.bias"} if frozen.endswith("weight") else set()
    assert members == {name for name, _ in model.named_parameters()} - {frozen} - left
    assert set(found.other_uses) == left


def test_a_parameter_in_something_else_too() -> None:
    """A penalty on the weight inside the model: no linear map, so by the base; its bias too, which has no column then."""
    model = Own(lambda m, x: functional.linear(x, m.w, m.b) + m.w.square().sum(), w=(3, 4), b=(3,)).double()
    found, uses = uses_of(model, output := model(vectors().double()), torch.randn_like(output))
    assert uses == []
    assert "w" in found.other_uses


def test_a_bias_in_something_else_too() -> None:
    """Then it is no column of its weight, which is a map all the same."""
    model = Own(lambda m, x: functional.linear(x, m.w, m.b) * m.b, w=(3, 4), b=(3,)).double()
    found, [(map_, _)] = uses_of(model, output := model(vectors().double()), torch.randn_like(output))
    assert map_.members == ("w",)
    assert set(found.other_uses) == {"b"}


def test_with_a_bias_and_without() -> None:
    """Uses of one weight: where there is no bias, its input is 0 in place of 1."""
    model = Own(lambda m, x: functional.linear(functional.linear(x, m.w, m.b).tanh(), m.w), w=(4, 4), b=(4,)).double()
    x = vectors().double()
    output = model(x)
    _, uses = uses_of(model, output, torch.randn_like(output))
    each = [Sums(map_, Kronecker()) for map_, _ in uses]
    for sums, (_, sides) in zip(each, uses, strict=True):
        sums.add(sides)
    total = merged(each)["w"]
    assert total.map.bias == "b"
    hidden = functional.linear(x, model.w, model.b).tanh().detach()
    ones = torch.ones(BATCH, 1).double()
    inputs = torch.cat((torch.cat((x, ones), 1), torch.cat((hidden, 0 * ones), 1)))
    torch.testing.assert_close(total.moments()["columns"][0], inputs.T @ inputs / (2 * BATCH))


def test_what_cannot_be_looked_into() -> None:
    """Fused recurrent layers and reentrant checkpoints are said to be hidden."""
    x = torch.randn(5, BATCH, 4)
    lstm = First(nn.LSTM(4, 3))
    assert find_uses([lstm(x)], {id(p): name for name, p in lstm.named_parameters()}).hidden
    layer = nn.Linear(4, 3)
    names = {id(p): name for name, p in layer.named_parameters()}
    kept = checkpoint(layer, vectors().requires_grad_(), use_reentrant=True)
    assert find_uses([kept], names).hidden
    assert not find_uses([vectors().requires_grad_().sin()], names).hidden
    assert not find_uses([layer(vectors())], names).hidden


@pytest.mark.parametrize("count", [1, 2, 7, 64, 512, 513, 1000, 1024, 4096, 99991])
def test_some_places(count: int) -> None:
    """No place twice, as many as are looked at, and no long stretch that is left out."""
    places = some_places(count, torch.device("cpu"))
    assert len(places) == min(count, statistics.PLACES) == len(set(places.tolist()))
    assert places.min() >= 0
    assert places.max() < count
    gaps = torch.diff(torch.cat((places.sort().values, places.min()[None] + count)))
    assert gaps.max() <= max(3 * max(1, count // len(places)) + 1, count // 32)


@pytest.mark.parametrize("case", ["linear of 3d", "conv2d"])
def test_a_sample_of_places_stands_for_all(case: str) -> None:
    """The sum over the chosen places times (all / chosen): exact where all places are alike, near it where they are random."""
    make, _ = CASES[case]
    model = make().double()
    one = torch.randn(4).double()
    x = one.expand(9, 200, 4) if case == "linear of 3d" else one[:, None, None].expand(2, 4, 60, 60)
    for alike in (True, False):
        output = model((x if alike else torch.randn_like(x)).clone())
        slope = torch.ones_like(output) if alike else torch.randn_like(output)
        _, [(map_, sides)] = uses_of(model, output, slope)
        assert sides[2] > 1
        sums, chosen = Sums(map_, Kronecker()), sides[0].shape[1]
        sums.add(sides)
        assert (
            sums.places == pytest.approx(chosen * sides[2]) == output.numel() / output.shape[-1 if x.dim() == 3 else 1]
        )
        if alike:
            full = slope.numel() / output.shape[-1 if x.dim() == 3 else 1]
            torch.testing.assert_close(sums.tensors["rows"], torch.full_like(sums.tensors["rows"], full))
        else:
            diagonal = sums.tensors["rows"].diagonal(dim1=1, dim2=2) / sums.places
            assert 0.3 < float(diagonal.min()) <= float(diagonal.max()) < 2.0


class Unrolled(nn.Module):
    """A recurrent cell that begins with a state of zeros, which is data too."""

    def __init__(self) -> None:
        super().__init__()
        self.input, self.state = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.new_zeros(len(x), 4)
        for part in x[:, :3], x[:, 3:]:
            hidden = (self.input(part) + self.state(hidden)).tanh()
        return hidden


READ_DATA: dict[str, tuple[nn.Module, Tensor, set[str]]] = {
    "linear": (nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(3, 6), {"0.weight"}),
    "flattened": (nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.Linear(4, 2)), torch.randn(3, 2, 3), {"1.weight"}),
    "asks for its gradient": (
        nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.Linear(4, 2)),
        torch.randn(3, 2, 3, requires_grad=True),
        {"1.weight"},
    ),
    "convolution": (
        nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.ConvTranspose2d(2, 1, 2)),
        torch.randn(2, 1, 4, 4),
        {"0.weight"},
    ),
    "transposed": (nn.Sequential(nn.ConvTranspose1d(2, 3, 2), nn.Conv1d(3, 1, 2)), torch.randn(2, 2, 4), {"0.weight"}),
    "after a norm": (nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 4)), torch.randn(3, 6), set()),
    "after an embedding": (nn.Sequential(nn.Embedding(5, 6), nn.Linear(6, 4)), torch.arange(3), set()),
    "three dimensions": (nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)), torch.randn(2, 3, 6), {"0.weight"}),
    "in some of its uses": (Unrolled(), torch.randn(2, 6), {"input.weight"}),
    "matmul": (Own(lambda own, x: x @ own.a @ own.b, a=(6, 4), b=(4, 2)), torch.randn(3, 6), {"a"}),
}


@pytest.mark.parametrize("case", READ_DATA)
def test_which_maps_read_the_data(case: str) -> None:
    """Those whose inputs are nothing that was learned; a map that reads something else too isn't one."""
    model, x, expected = READ_DATA[case]
    output = model(x)
    names = {id(p): name for name, p in model.named_parameters()}
    sums = []
    for use in find_uses([output], names).uses:
        sums.append(Sums(use.map, Kronecker()))
        sums[-1].add(use.sides(torch.ones(use.node._input_metadata[0].shape)))  # type: ignore[attr-defined]
    found = merged(sums)
    assert len(found) >= 1
    assert {key for key, each in found.items() if each.map.reads_data} == expected


@pytest.mark.parametrize(
    ("case", "bias"),
    [
        ("linear of a transposed input", "b"),
        ("x @ W + b", "b"),
        ("x @ W + b twice", None),
        ("W @ x + b", None),
        ("an outer sum", None),
    ],
)
def test_a_bias_that_is_added_by_itself(case: str, bias: str | None) -> None:
    """It belongs to the map, however torch has computed it, unless something else sees the product without it."""
    torch.manual_seed(0)
    make, inputs = CASES[case]
    model = make()
    found = find_uses([model(inputs())], {id(p): name for name, p in model.named_parameters()})
    assert [use.map.bias for use in found.uses] == [bias]
    assert found.other_uses == ({} if bias else {"b": "AddBackward0"})


@pytest.mark.parametrize(("zeros", "sparse"), [(0.85, False), (0.95, True)])
def test_data_that_are_mostly_zeros(zeros: float, sparse: bool) -> None:
    """A layer that reads them is left to the base, as an embedding is; what other layers return may have as many."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.Dropout(0.97), nn.Linear(30, 2))
    x = torch.randn(50, 40) * (torch.arange(2000).reshape(50, 40) % 100 >= 100 * zeros)
    found = find_uses([model(x)], {id(p): name for name, p in model.named_parameters()})
    left = {"0.weight": "SparseData", "0.bias": "SparseData"} if sparse else {}
    assert found.other_uses == left
    assert [use.map.weight for use in found.uses] == ["2.weight", "0.weight"][: 1 if sparse else 2]


def test_a_weight_whose_uses_dont_go_together_is_told_so() -> None:
    """All of W and its first two rows: no one block covers both, the base steps it, and `assignments` says why."""

    class Overlapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.head = nn.Parameter(torch.eye(4)), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head((x @ self.w).tanh() + x[:, :2] @ self.w[:2])  # type: ignore[no-any-return]

    model = Overlapping()
    optimizer = LLQR(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(torch.ones(5, 4)).square().mean().backward()
    optimizer.step()
    told = optimizer.assignments()
    assert told["w"] == "by the base: used by several products, as matrices that don't go together"
    assert told["head.weight"].startswith("along U m")
