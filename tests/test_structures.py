"""Promise: every structure acts by its formula, its derivatives are exact, and names are given structures as documented."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llqr.errors import LLQRError
from llqr.preconditioner import Preconditioner
from llqr.structures import Dense, Diagonal, EigenKronecker, Kronecker, Scalar, Structure, kronecker
from llqr.structures.stacks import assign

STRUCTURES = [
    Scalar(),
    Diagonal(),
    Dense(),
    Kronecker(),
    Kronecker(max_dim=2),
    EigenKronecker(),
    EigenKronecker(max_dim=2),
]
SHAPES = [(), (3,), (1,), (2, 3), (4, 1), (3, 2, 2), (3, 2, 2, 2), (2, 1, 3, 3)]


def random_block(structure: Structure, shape: tuple[int, ...], count: int, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    identity = structure.identity(shape, torch.empty(0, dtype=torch.float64), count)
    return {name: tensor + 0.5 * torch.randn_like(tensor) for name, tensor in identity.items()}


CASES = st.tuples(st.sampled_from(STRUCTURES), st.sampled_from(SHAPES), st.integers(1, 3), st.integers(0, 1000))


@given(CASES)
def test_derivatives_are_autograds(case: tuple[Structure, tuple[int, ...], int, int]) -> None:
    """derivative(dT) = ∂(U x)/∂T · dT = (U(T + h dT) x - U(T - h dT) x) / 2h to second order in h, and pullback(P) is
    (∂(U x)/∂T)ᵀ P, on stacks of blocks; in any order, and as often as one likes."""
    structure, shape, count, seed = case
    tensors, change = random_block(structure, shape, count, seed), random_block(structure, shape, count, seed + 1)
    x, cotangent = torch.randn(count, *shape).double(), torch.randn(count, *shape).double()
    value, tangent = torch.func.jvp(lambda t: structure.apply(t, x), (tensors,), (change,))
    gradient = torch.func.vjp(lambda t: structure.apply(t, x), tensors)[1](cotangent)[0]
    linear = structure.linearize(tensors, x)
    found = linear.derivative(change)
    torch.testing.assert_close(found, tangent, rtol=1e-12, atol=1e-12)
    for _ in range(2):
        torch.testing.assert_close(linear.pullback(cotangent), gradient, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(linear.value(), value, rtol=1e-12, atol=1e-12)
    there, back = (structure.apply({n: t + h * change[n] for n, t in tensors.items()}, x) for h in (1e-5, -1e-5))
    torch.testing.assert_close(found, (there - back) / 2e-5, rtol=1e-6, atol=1e-6 * (1 + float(found.norm())))


@pytest.mark.parametrize(("structure", "of_short", "of_long"), [(Kronecker(), 4, 3), (EigenKronecker(), 9, 8)])
def test_derivatives_share_products(structure: Structure, of_short: int, of_long: int) -> None:
    """So many matrix products along the shorter side and the longer for U x, a pullback and a derivative together."""
    for short, (m, n) in enumerate(((5, 7), (7, 5))):
        tensors = random_block(structure, (m, n), 1, 0)
        x = torch.randn(1, m, n).double()
        with (
            mock.patch.object(kronecker, "multiply", wraps=kronecker.multiply) as products,
            mock.patch.object(kronecker, "pull", wraps=kronecker.pull) as pulls,
        ):
            linear = structure.linearize(tensors, x)
            linear.derivative(linear.pullback(linear.value()))
        sides = [call.args[2] for call in products.mock_calls] + [call.args[3] for call in pulls.mock_calls]
        assert (sides.count(short), sides.count(1 - short)) == (of_short, of_long)


@given(CASES)
def test_stack_is_its_blocks(case: tuple[Structure, tuple[int, ...], int, int]) -> None:
    """Block i of a stack acts on x_i alone."""
    structure, shape, count, seed = case
    tensors, x = random_block(structure, shape, count, seed), torch.randn(count, *shape).double()
    together = structure.apply(tensors, x)
    for i in range(count):
        alone = structure.apply({name: tensor[i : i + 1] for name, tensor in tensors.items()}, x[i : i + 1])
        torch.testing.assert_close(together[i], alone[0], rtol=1e-12, atol=1e-12)


@given(CASES, st.floats(0.01, 100))
def test_identity_scale_degree_and_memory(case: tuple[Structure, tuple[int, ...], int, int], factor: float) -> None:
    """I x = x; scaled(T, c) acts as c U; U x is a polynomial of the stated degree in T; memory counts the tensors' bytes."""
    structure, shape, count, seed = case
    x = torch.randn(count, *shape).double()
    identity = structure.identity(shape, x, count)
    torch.testing.assert_close(structure.apply(identity, x), x, rtol=0, atol=0)
    assert {name: tuple(tensor.shape[1:]) for name, tensor in identity.items()} == structure.sizes(shape)
    assert structure.memory(shape, itemsize=8) * count == sum(8 * tensor.numel() for tensor in identity.values())
    tensors = random_block(structure, shape, count, seed)
    torch.testing.assert_close(
        structure.apply(structure.scaled(tensors, factor), x),
        factor * structure.apply(tensors, x),
        rtol=1e-11,
        atol=1e-11,
    )
    doubled = structure.apply({name: 2 * tensor for name, tensor in tensors.items()}, x)
    torch.testing.assert_close(
        doubled, 2 ** structure.degree(shape) * structure.apply(tensors, x), rtol=1e-11, atol=1e-11
    )


def columns(x: torch.Tensor) -> torch.Tensor:
    """vec of a matrix: its columns on top of each other."""
    return x.T.reshape(-1)


def test_kronecker_is_the_dense_kronecker_product() -> None:
    """vec(C X Dᵀ) = (D ⊗ C) vec(X)."""
    block = random_block(Kronecker(), (3, 4), 1, 0)
    x = torch.randn(3, 4).double()
    y = Kronecker().apply(block, x[None])[0]
    torch.testing.assert_close(columns(y), torch.kron(block["D"][0], block["C"][0]) @ columns(x))


def test_eigen_kronecker_is_the_dense_formula() -> None:
    """vec(Y) = (Q_R ⊗ Q_L) diag(s) (Q_R ⊗ Q_L)ᵀ vec(X)."""
    block = random_block(EigenKronecker(), (3, 4), 1, 0)
    x = torch.randn(3, 4).double()
    basis = torch.kron(block["Q_R"][0], block["Q_L"][0])
    y = EigenKronecker().apply(block, x[None])[0]
    torch.testing.assert_close(columns(y), basis @ torch.diag(columns(block["s"][0])) @ basis.T @ columns(x))


def test_long_sides_are_diagonal() -> None:
    """A side beyond max_dim gets a vector: Y = diag(c) X Dᵀ. By default a vocabulary is one, and a ResNet's 4608 is not."""
    assert Kronecker().sizes((50_000, 256)) == {"C": (50_000,), "D": (256, 256)}
    assert Kronecker().sizes((512, 512, 3, 3)) == {"C": (512, 512), "D": (4608, 4608)}
    assert EigenKronecker().sizes((50_000, 256)) == {"Q_L": (50_000,), "Q_R": (256, 256), "s": (50_000, 256)}
    block = random_block(Kronecker(max_dim=3), (5, 3), 1, 0)
    x = torch.randn(5, 3).double()
    y = Kronecker(max_dim=3).apply(block, x[None])[0]
    torch.testing.assert_close(y, torch.diag(block["C"][0]) @ x @ block["D"][0].T)


def test_low_precision_gradients_have_float32_blocks() -> None:
    gradients = {"w": torch.randn(3, 2).bfloat16(), "v": torch.randn(3).double()}
    u = Preconditioner.identity(gradients, "kfac")
    assert u.blocks["w"]["C"].dtype == torch.float32
    assert u.blocks["v"]["d"].dtype == torch.float64
    assert u.apply(gradients)["w"].dtype == torch.bfloat16


NAMES = ["embed.weight", "layers.0.attn.weight", "layers.0.attn.bias", "layers.1.mlp.weight", "head.weight"]


def test_patterns() -> None:
    """A key is a parameter, a module, or a pattern for either; the first that matches wins."""
    given = assign({"embed": "diagonal", "*.bias": "scalar", "layers.*.mlp": Dense(), "*": "kfac"}, NAMES)
    assert list(given.values()) == [Diagonal(), Kronecker(), Scalar(), Dense(), Kronecker()]
    assert set(assign("ekfac", NAMES).values()) == {EigenKronecker()}


PATTERNS = [*NAMES, "embed", "layers", "layers.0", "layers.?", "layers.[0]", "*.bias", "*.mlp", "*"]


@given(st.permutations(PATTERNS))
def test_the_first_pattern_that_matches_wins(patterns: list[str]) -> None:
    """By the rule itself: a pattern matches a parameter, or one of the modules that hold it."""
    kinds = {pattern: Kronecker(max_dim=1 + i) for i, pattern in enumerate(patterns)}
    for name, kind in assign(kinds, NAMES).items():
        parts = name.split(".")
        answers = [".".join(parts[:depth]) for depth in range(1, 1 + len(parts))]
        first = next(p for p in patterns if any(fnmatchcase(answer, p) for answer in answers))
        assert kind is kinds[first], (name, first)


def test_parameters_by_their_names_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refit names every parameter: matching all names with all others would grow with the square of their number."""
    calls = []
    monkeypatch.setattr("llqr.structures.stacks.fnmatchcase", lambda *names: calls.append(names) or fnmatchcase(*names))
    names = [f"layers.{i}.weight" for i in range(200)]
    assign({**dict.fromkeys(names, "kfac"), "layers.7*": "scalar"}, names)
    assert len(calls) < 5 * len(names)


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ("kfca", "did you mean 'kfac'"),
        ({"*": "diagnoal"}, "did you mean 'diagonal'"),
        (Kronecker, r"write Kronecker\(\)"),
        (3, "unknown structure 3"),
        ({"haed": "scalar", "*": "kfac"}, "did you mean 'head'"),
        ({"embed": "scalar"}, r"'layers\.0\.attn\.weight'.*\"\*\""),
        ({0: "scalar"}, "not a string"),
    ],
)
def test_bad_structures_are_explained(structure: object, message: str) -> None:
    with pytest.raises(LLQRError, match=message):
        Preconditioner.identity({name: torch.zeros(2) for name in NAMES}, structure)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Kronecker(max_dim=0),
        lambda: EigenKronecker(max_dim=-1),
    ],
)
def test_bad_options_are_refused(make: object) -> None:
    with pytest.raises(LLQRError):
        make()


def test_a_block_too_large_says_so() -> None:
    """A dense block for n numbers takes n² of them: 30,000² · 4 bytes = 3.4 GB; nothing is allocated to find out."""
    large = {"w": torch.empty(300, 100, device="meta")}
    with pytest.raises(LLQRError, match=r"'w' would take 3\.4 GB.*kfac"):
        Preconditioner.identity(large, "dense")
    with pytest.raises(LLQRError, match="floating-point"):
        Preconditioner.identity({"w": torch.zeros(3, dtype=torch.int64)}, "dense")


def test_blocks_of_one_shape_share_a_stack() -> None:
    """Forty layers of one shape are one batched product; large parameters stay by themselves."""
    layers = {f"{i}.weight": torch.zeros(4, 4) for i in range(40)} | {
        f"large{i}": torch.zeros(300, 250) for i in range(2)
    }
    u = Preconditioner.identity(layers, "kfac")
    assert sorted(len(group.names) for group in u.groups) == [1, 1, 40]
    assert u.memory == 4 * (40 * 32 + 2 * (300**2 + 250**2))
    assert math.isclose(u.memory, sum(Kronecker().memory(tuple(p.shape)) for p in layers.values()))
