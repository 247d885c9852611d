"""Against the definitions, and through lm-evaluation-harness itself with a task of our own."""

import json
from types import SimpleNamespace

import pytest
import torch

from tsemon.errors import InvalidArgument
from tsemon.lab.train.downstream import Harness, downstream
from tsemon.lab.train.tokenizers import Bytes, train_words
from tsemon.models import CausalLanguageModel, CausalLanguageModelConfig, TextEncoder, TextEncoderConfig

SIZES = {"vocab": 256, "context": 24, "depth": 1, "width": 16, "heads": 2, "ffn": 32}


def language_model(**fields):
    torch.manual_seed(0)
    return CausalLanguageModel(CausalLanguageModelConfig(**SIZES | fields, norm="pre")).double().eval()


def requests(*args):
    return [SimpleNamespace(args=one) for one in args]


@torch.no_grad()
def likelihood(model, context, continuation):
    """Of bytes, one token at a time, with at most 24 tokens before each."""
    tokens, total, is_greedy = list(context + continuation), 0.0, True
    for place in range(len(context), len(tokens)):
        before = (tokens[-25:] if len(tokens) > 25 else tokens)[: place - max(len(tokens) - 25, 0)]
        logits = model(torch.tensor([before]))[0, -1]
        total += logits.log_softmax(0)[tokens[place]].item()
        is_greedy &= logits.argmax().item() == tokens[place]
    return total, is_greedy


class TestAHarness:
    def test_has_the_likelihood_of_each_continuation_whatever_is_in_its_batch(self):
        model = language_model()
        pairs = [
            ("a", "b"),
            ("one two", " three"),
            ("", "x"),
            ("a long context, longer than 24", " tokens"),
            ("q", "r"),
        ]
        for batch_size in (1, 3):
            found = Harness(model, Bytes(), batch_size=batch_size).loglikelihood(requests(*pairs), disable_tqdm=True)
            for (context, continuation), (value, is_greedy) in zip(pairs, found, strict=True):
                expected = likelihood(model, context.encode() or b"\0", continuation.encode())
                assert (value, is_greedy) == (pytest.approx(expected[0], rel=1e-9), expected[1])

    def test_knows_the_likeliest_continuation(self):
        model = language_model()
        answer = Harness(model, Bytes()).generate_until(requests(("one", {"max_gen_toks": 1})))
        likeliest = model(torch.tensor([list(b"one")]))[0, -1].argmax().item()
        assert answer == [bytes([likeliest]).decode(errors="replace")]
        if likeliest < 128:
            ((_, is_greedy),) = Harness(model, Bytes()).loglikelihood(
                requests(("one", chr(likeliest))), disable_tqdm=True
            )
            assert is_greedy

    def test_has_the_likelihood_of_a_text_that_is_longer_than_the_context(self):
        model, text = language_model(), b"0123456789" * 5
        (found,) = Harness(model, Bytes()).loglikelihood_rolling(requests((text.decode(),)))
        # Windows of 24 tokens side by side, and the last one with as many tokens before it as there is room for.
        tokens, expected = [0, *text], 0.0
        for first, last in ((0, 24), (24, 48), (26, 50)):
            logits = model(torch.tensor([tokens[first:last]]))[0].log_softmax(-1)
            new = range(first, last) if last < 50 else range(48, 50)
            expected += sum(logits[place - first, tokens[place + 1]].item() for place in new)
        assert found == pytest.approx(expected, rel=1e-9)

    def test_ends_an_answer_where_its_task_says(self):
        model = language_model()
        (whole,) = Harness(model, Bytes()).generate_until(requests(("one", {"max_gen_toks": 12})))
        (cut,) = Harness(model, Bytes()).generate_until(requests(("one", {"max_gen_toks": 12, "until": [whole[3]]})))
        assert cut == whole[: whole.index(whole[3])]

    def test_reads_half_a_context_of_a_question_at_least(self):
        model, seen = language_model(), []
        model.register_forward_pre_hook(lambda _, args: seen.append(bytes(args[0][0].tolist())))
        harness = Harness(model, Bytes())
        harness.generate_until(requests(("The capital of France is", {}), ("short", {})))
        assert seen[0] == b"of France is"  # 12 of 24 tokens
        assert b"short" in seen

    def test_says_what_it_cannot_ask(self):
        encoder = TextEncoder(TextEncoderConfig(**SIZES))
        with pytest.raises(InvalidArgument, match="CausalLanguageModel or a Llama, got TextEncoder"):
            Harness(encoder, Bytes())
        with pytest.raises(InvalidArgument, match="need a tokenizer with a token that ends documents"):
            Harness(language_model(), train_words(["a b c"], 5))


class TestDownstreamTasks:
    def test_are_scored_by_the_harness(self, tmp_path):
        """Two choices for each question, of which the first is right in three of four."""
        model = language_model()
        harness = Harness(model, Bytes())
        rows = []
        for index in range(12):
            question, choices = f"Question {index}:", [" yes", " no!"]
            values = harness.loglikelihood(requests(*((question, choice) for choice in choices)), disable_tqdm=True)
            likelier = max((0, 1), key=lambda choice: values[choice][0])
            rows.append({"question": question, "choices": choices, "gold": likelier if index % 4 else 1 - likelier})
        path = tmp_path / "questions.json"
        path.write_text("\n".join(map(json.dumps, rows)))
        task = {
            "task": "choices",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(path)}, "cache_dir": str(tmp_path / "cache")},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "gold",
            "target_delimiter": "",
            "metric_list": [{"metric": "acc"}],
        }
        model.train()
        drawn = []
        for seed in (7, 8):
            torch.manual_seed(seed)
            expected = torch.rand(3)
            torch.manual_seed(seed)
            assert downstream(model, Bytes(), [task]) == {"choices_acc": 0.75}
            drawn.append(torch.equal(torch.rand(3), expected))
        assert drawn == [True, True], "the training draws the same numbers as without the evaluation"
        assert model.training
