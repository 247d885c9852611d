import pytest
import torch

from tests.tsemon.models.variants import VARIANTS, inputs_for, language, parametrised
from tests.tsemon.models.written_out import EXACT
from tsemon.errors import InvalidArgument, ShapeError
from tsemon.models import Cache, Llama, generate


def make(**fields):
    torch.manual_seed(0)
    return language(**fields).double()


@pytest.fixture
def prompt_BT():
    return inputs_for(language)[:, :3]


class TestACache:
    @pytest.mark.parametrize(**parametrised(VARIANTS))
    @pytest.mark.parametrize("chunks", [[9], [1] * 9, [3, 1, 1, 4], [2, 7]], ids=str)
    def test_changes_no_logit_however_the_text_is_cut(self, fields, chunks):
        model, tokens, cache = make(**fields), inputs_for(language), Cache()
        logits = torch.cat([model(chunk, cache=cache) for chunk in tokens.split(chunks, dim=1)], dim=1)
        torch.testing.assert_close(logits, model(tokens), **EXACT)
        assert cache.num_tokens == 9

    def test_knows_its_size(self, prompt_BT):
        cache = Cache()
        make()(prompt_BT, cache=cache)
        assert cache.size_bytes == 3 * 2 * (2 * 3 * 12) * 8  # layers, keys and values, B x T x D, float64

    def test_is_refused_where_the_mean_of_the_whole_sequence_would_change_with_every_token(self, prompt_BT):
        with pytest.raises(InvalidArgument, match="without a cache"):
            generate(make(tau=0.5, full_mean=True), prompt_BT, 2)


class TestGenerate:
    @pytest.mark.parametrize(**parametrised(VARIANTS))
    def test_takes_the_likeliest_token_each_time(self, prompt_BT, fields):
        model, expected_BT = make(**fields), prompt_BT
        for _ in range(6):
            next_B1 = model(expected_BT)[:, -1:].argmax(dim=2)
            expected_BT = torch.cat([expected_BT, next_B1], dim=1)
        assert torch.equal(generate(model, prompt_BT, 6), expected_BT)

    @pytest.mark.parametrize("temperature", [0.1, 1.0, 100.0])
    def test_with_one_token_to_choose_from_is_greedy(self, prompt_BT, temperature):
        chosen = generate(make(), prompt_BT, 6, temperature=temperature, top_k=1)
        assert torch.equal(chosen, generate(make(), prompt_BT, 6))

    def test_at_a_temperature_near_zero_is_greedy(self, prompt_BT):
        assert torch.equal(generate(make(), prompt_BT, 6, temperature=1e-45), generate(make(), prompt_BT, 6))

    def test_draws_the_same_again_from_a_generator(self, prompt_BT):
        def draw(seed):
            return generate(make(), prompt_BT, 6, temperature=1.0, generator=torch.Generator().manual_seed(seed))

        assert torch.equal(draw(0), draw(0))
        assert not torch.equal(draw(0), draw(1))

    @pytest.mark.parametrize("top_k", [None, 3, 20, 50])
    def test_draws_as_often_as_the_softmax_says(self, top_k):
        model, num_draws = make(), 20_000
        prompt_BT = torch.full((num_draws, 1), 7)
        logits_V = model(prompt_BT[:1])[0, -1] / 0.5
        if top_k == 3:
            logits_V[logits_V < logits_V.sort().values[-3]] = -torch.inf
        generator = torch.Generator().manual_seed(0)
        drawn_B = generate(model, prompt_BT, 1, temperature=0.5, top_k=top_k, generator=generator)[:, 1]
        found_V = drawn_B.bincount(minlength=20) / num_draws
        # Five standard errors of a share of at most a half: 5 * sqrt(1 / 4 / 20,000).
        torch.testing.assert_close(found_V.double(), logits_V.softmax(0), rtol=0, atol=0.018)
        assert (found_V[logits_V.isinf()] == 0).all()

    def test_of_equally_likely_tokens_takes_no_more_than_it_should(self):
        def indifferent(tokens_BT, cache):
            return torch.zeros(*tokens_BT.shape, 20)

        drawn = generate(indifferent, torch.zeros(500, 1, dtype=torch.int64), 1, temperature=1.0, top_k=3)[:, 1]
        assert len(drawn.unique()) == 3

    def test_leaves_the_prompt_and_the_gradients_alone(self, prompt_BT):
        assert torch.equal(generate(make(), prompt_BT, 0), prompt_BT)
        longer_BT = generate(make(), prompt_BT, 2)
        assert torch.equal(longer_BT[:, :3], prompt_BT)
        assert not longer_BT.requires_grad

    def test_ends_with_the_context(self, prompt_BT):
        assert generate(make(), prompt_BT, 7).shape == (2, 10)  # the last token is never read
        with pytest.raises(InvalidArgument, match=r"3 tokens and num_new 8 are more than the model's context of 9"):
            generate(make(), prompt_BT, 8)  # before any work

    @pytest.mark.parametrize(
        "options", [{"num_new": -1}, {"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": 0}]
    )
    def test_tells_which_settings_it_takes(self, prompt_BT, options):
        with pytest.raises(InvalidArgument, match=r"num_new >= 0, temperature >= 0 and top_k >= 1"):
            generate(make(), **{"tokens_BT": prompt_BT, "num_new": 1} | options)

    def test_needs_a_token_to_go_on_from(self):
        with pytest.raises(InvalidArgument, match=r"at least one token to go on from.*got \(2, 0\)"):
            generate(make(), torch.zeros(2, 0, dtype=torch.int64), 1)


class TestTheCacheOfAnotherBatch:
    def test_is_refused(self):
        model, cache = make(), Cache()
        model(torch.zeros(2, 3, dtype=torch.int64), cache=cache)
        with pytest.raises(ShapeError, match="it has read 2 sequences, got 3"):
            model(torch.zeros(3, 1, dtype=torch.int64), cache=cache)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_llama_takes_no_tokens_as_it_takes_many(shape):
    model = Llama.from_preset("resformer-2m", vocab=9)
    assert model(torch.zeros(shape, dtype=torch.int64)).shape == (*shape, 9)
