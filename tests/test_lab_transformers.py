"""What the lab's transformers may look at, and what they must not."""

from __future__ import annotations

import math

import pytest
import torch

from llqr_lab.models.transformers import TranslationTransformer, positions
from llqr_lab.models.zoo import build
from small_lab import PAD, WORDS, batch, mean_loss, sentences, small


def translator() -> TranslationTransformer:
    model = small("translation-transformer", layers=2)
    assert isinstance(model, TranslationTransformer)
    return model.double().eval()


def test_gpt_looks_back_only() -> None:
    model, tokens = small("gpt").eval(), torch.randint(WORDS, (2, 6))
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % WORDS
    first, second = model(tokens), model(changed)
    torch.testing.assert_close(first[:, :4], second[:, :4])
    assert all(not torch.allclose(first[:, place], second[:, place]) for place in (4, 5))
    torch.testing.assert_close(model(tokens[:, :3]), first[:, :3])  # shorter texts use the first positions


def test_a_text_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="7 tokens in a row, and the model has positions for 6"):
        small("gpt")(torch.zeros(1, 7, dtype=torch.long))


def test_the_head_of_gpt_is_its_embedding() -> None:
    model = small("gpt")
    assert model.get_parameter("embed.weight") is model.get_submodule("head").weight
    assert model.get_submodule("head").bias is None
    within, added = (model.get_parameter(f"blocks.0.mlp.{layer}.weight").detach().std() for layer in (0, 2))
    assert float(added / within) == pytest.approx(0.5, rel=0.2)  # (2 · 2 layers)^-½


def test_the_grokking_transformer_answers_after_the_last_token() -> None:
    model, tokens = small("grokking-transformer").eval(), torch.randint(WORDS, (2, 4))
    for place in range(4):
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1) % WORDS
        assert not torch.allclose(model(tokens), model(changed))


def test_the_decoder_looks_back_only() -> None:
    model, source, target = translator(), sentences(9, 4, 2), torch.randint(2, WORDS, (2, 5))
    changed = target.clone()
    changed[:, 3] = 2 + (changed[:, 3] - 1) % (WORDS - 2)
    first, second = model(source, target), model(source, changed)
    torch.testing.assert_close(first[:, :3], second[:, :3])
    assert not torch.allclose(first[:, 3], second[:, 3])


def test_padding_changes_nothing_about_words() -> None:
    model, source, target = translator(), sentences(9, 5, 4), sentences(WORDS, 6, 4)
    together = model(source, target)
    for row in range(4):
        alone = model(source[row : row + 1, : 5 - row], target[row : row + 1, : 6 - row])
        torch.testing.assert_close(together[row, : 6 - row], alone[0])


def test_what_stands_in_padded_places_of_the_memory_is_never_read() -> None:
    model, (source, target) = translator(), batch("translation-transformer")[0]
    memory = model.encode(source)
    spoilt = torch.where((source == PAD)[..., None], 1e3, memory)
    torch.testing.assert_close(model.decode(target, memory, source), model.decode(target, spoilt, source))


def test_rows_of_padding_alone_are_finite_and_so_are_their_gradients() -> None:
    model, (source, target), targets = translator(), *batch("translation-transformer")
    source[1], target[2] = PAD, PAD
    output = model.train()(source, target)
    assert output.isfinite().all()
    mean_loss(output, targets).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_word_by_word_decoding_agrees_with_the_whole() -> None:
    model, (source, target) = translator(), batch("translation-transformer")[0]
    memory, whole = model.encode(source), model(source, target)
    for places in range(1, target.shape[1] + 1):
        torch.testing.assert_close(model.decode(target[:, :places], memory, source), whole[:, :places])


def test_words_begin_with_unit_variance_and_padding_as_zero() -> None:
    model = TranslationTransformer(500, 600, width=64, heads=2, layers=1)
    for words in (model.source, model.target):
        assert not words.table.weight[PAD].any()
        assert float(words.table.weight.detach().std()) == pytest.approx(1 / 8, rel=0.02)
    assert model.head.weight is model.target.table.weight
    looked_up = model.eval().source(torch.full((1, 3), 7))
    torch.testing.assert_close(looked_up, 8 * model.source.table.weight[7] + positions(3, looked_up)[None])


def test_projections_begin_as_xaviers_uniform_weights() -> None:
    width, ffn = 64, 96
    layer = TranslationTransformer(9, 9, width, ffn, heads=2, layers=1).decoder[0]
    bounds = {
        "attention.query": math.sqrt(6 / (4 * width)),
        "cross.value": math.sqrt(6 / (4 * width)),
        "cross.out": math.sqrt(6 / (2 * width)),
        "mlp.0": math.sqrt(6 / (width + ffn)),
    }
    for name, bound in bounds.items():
        module = layer.get_submodule(name)
        assert float(module.get_parameter("weight").detach().abs().max()) == pytest.approx(bound, rel=0.01)
        assert not module.get_parameter("bias").any()


def test_positions_are_sines_and_cosines_from_one_turn_of_a_radian_to_a_ten_thousandth() -> None:
    table = positions(4, torch.empty(6, dtype=torch.float64))
    t = torch.arange(4, dtype=torch.float64)
    for column, frequency in enumerate((1.0, 0.01, 0.0001)):
        torch.testing.assert_close(table[:, column], (t * frequency).sin())
        torch.testing.assert_close(table[:, 3 + column], (t * frequency).cos())


@pytest.mark.parametrize("reads", ["last", "all"])
def test_how_the_grokking_transformer_s_weights_begin(reads: str) -> None:
    model = build("grokking-transformer", start=0.03, reads=reads)
    lecun = build("grokking-transformer", start="lecun", reads=reads)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            assert float(parameter.detach().std()) == pytest.approx(0.03, rel=0.1), name
            wanted = {"position": 1.0, "embed.weight": 128**-0.5}.get(name, parameter.shape[1] ** -0.5)
            drawn = lecun.get_parameter(name).detach()
            assert float(drawn.std()) == pytest.approx(wanted, rel=0.1), name
            if name not in ("position", "embed.weight"):
                assert float(drawn.abs().max()) <= 2 / 0.8796 * wanted
        else:
            # gains of norms, and biases
            assert parameter.unique().numel() == 1, name
            assert lecun.get_parameter(name).unique().numel() == 1, name
    for options in ({"start": "lecum"}, {"start": -0.1}, {"reads": "first"}):
        with pytest.raises(ValueError, match="not"):
            build("grokking-transformer", **options)


def test_the_grokking_transformer_reads_the_last_place_or_all_of_them() -> None:
    """Without positions and attention, what is read of `last` knows nothing of the first token; of `all` it does."""
    tokens = torch.tensor([[1, 5, 2, 6], [3, 5, 2, 6]])
    for reads, differ in (("last", False), ("all", True)):
        model = build("grokking-transformer", words=7, width=8, heads=2, reads=reads, start="lecun")
        for name, parameter in model.named_parameters():
            if "out" in name:
                parameter.data.zero_()
        one, other = model(tokens)
        assert torch.equal(one, other) is not differ
    embedded = model.get_submodule("embed")(tokens)
    seen: list[torch.Tensor] = []
    model.get_submodule("blocks").register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    model(tokens)
    torch.testing.assert_close(seen[0], 8**0.5 * embedded + model.get_parameter("position"))
