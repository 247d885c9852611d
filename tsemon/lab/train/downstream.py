"""Downstream tasks: a model of `tsemon.models` and its tokenizer as lm-evaluation-harness wants language models.

Axes: `B` batch, `T` tokens, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tsemon.errors import InvalidArgument, needing
from tsemon.lab.train.tokenizers import Tokenizer
from tsemon.models import CausalLanguageModel, Llama, generate

with needing("downstream tasks need lm-evaluation-harness; pip install 'tsemon[downstream]'"):
    from lm_eval import evaluator, utils
    from lm_eval.api.model import TemplateLM

NUM_NEW = 256
"""Tokens of an answer, unless its task says how many."""
Model = CausalLanguageModel | Llama


def downstream(
    model: Model, tokenizer: Tokenizer, tasks: Sequence[str | dict[str, Any]], *, batch_size: int = 16, **options: Any
) -> dict[str, float]:
    """Scores on tasks of lm-evaluation-harness by name, such as `hellaswag_acc`: `monitor.step(**scores)` records them.

    tasks: names of the harness, or configurations of tasks of your own.
    options: arguments of `lm_eval.simple_evaluate`, such as `num_fewshot` and `limit`.
    The model is in eval mode meanwhile. Raises InvalidArgument for a model that is no decoder or a tokenizer without a token
    that ends documents.
    """
    harness = Harness(model, tokenizer, batch_size=batch_size)
    was_training = model.training
    model.eval()
    # The harness would seed the generators that the training draws from.
    options = dict.fromkeys(("random_seed", "numpy_random_seed", "torch_random_seed")) | options
    try:
        found = evaluator.simple_evaluate(model=harness, tasks=list(tasks), bootstrap_iters=0, **options)
    finally:
        model.train(was_training)
    return {
        f"{task}_{metric.removesuffix(',none').replace(',', '_')}": float(value)
        for task, metrics in found["results"].items()
        for metric, value in metrics.items()
        if isinstance(value, int | float) and metric != "sample_len" and "_stderr" not in metric
    }


class Harness(TemplateLM):  # type: ignore[misc]
    """Log-likelihoods and answers of a decoder. Contexts that are too long lose their beginning."""

    def __init__(self, model: Model, tokenizer: Tokenizer, *, batch_size: int = 16) -> None:
        if not isinstance(model, Model):
            raise InvalidArgument(f"downstream tasks need a CausalLanguageModel or a Llama, got {type(model).__name__}")
        if tokenizer.separator is None:
            raise InvalidArgument(
                "downstream tasks need a tokenizer with a token that ends documents, and words has none"
            )
        super().__init__()
        self._model, self._tokens, self._batch_size = model, tokenizer, batch_size
        self._context = model.config.context

    @property
    def eot_token_id(self) -> int:
        assert self._tokens.separator is not None
        return self._tokens.separator

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return list(self._tokens.encode([string])[0])

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation, and whether all of its tokens are the likeliest ones."""
        rows = [
            ((*context, *continuation)[-self._context - 1 :], len(continuation))
            for _, context, continuation in requests
        ]
        found: list[tuple[float, bool]] = []
        for first in range(0, len(rows), self._batch_size):
            batch = rows[first : first + self._batch_size]
            # A decoder's logits do not depend on what follows, so that padding behind a row changes nothing.
            longest = max(len(tokens) for tokens, _ in batch)
            padded = [[*tokens, *[0] * (longest - len(tokens))] for tokens, _ in batch]
            tokens_BT = torch.tensor(padded, device=self._place)
            logits_BTV = self._model(tokens_BT[:, :-1])
            for (tokens, num), logits_TV, row_T in zip(batch, logits_BTV, tokens_BT, strict=True):
                end = len(tokens) - 1
                start = max(end - num, 0)
                found.append(_likelihood(logits_TV[start:end], row_T[start + 1 : end + 1]))
        return found

    def loglikelihood_rolling(self, requests: Iterable[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, in windows of the context; each token is predicted once."""
        found = []
        for request in requests:
            windows = utils.get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self._context, context_len=1
            )
            pairs = [("", *utils.make_disjoint_window(window)) for window in windows]
            found.append(sum(likelihood for likelihood, _ in self._loglikelihood_tokens(pairs)))
        return found

    def generate_until(self, requests: Iterable[Any], disable_tqdm: bool = False) -> list[str]:
        """The likeliest answers, up to the first of the texts that end one."""
        return [self._answer(*request.args) for request in requests]

    def _answer(self, question: str, options: dict[str, Any]) -> str:
        stops = options.get("until") or []
        stops = [stops] if isinstance(stops, str) else stops
        tokens = self.tok_encode(question) or [self.eot_token_id]
        # At least half of the context is the question's.
        room = max(self._context - len(tokens), self._context // 2)
        num_new = min(options.get("max_gen_toks", NUM_NEW), room)
        tokens_1T = torch.tensor([tokens[num_new - self._context :]], device=self._place)
        answer_T = generate(self._model, tokens_1T, num_new)[0, tokens_1T.shape[1] :]
        answer = self._tokens.decode(_until(answer_T.tolist(), self.eot_token_id))
        return answer[: min((answer.find(stop) for stop in stops if stop in answer), default=len(answer))]

    @property
    def _place(self) -> torch.device:
        return next(self._model.parameters()).device


def _likelihood(logits_TV: Tensor, tokens_T: Tensor) -> tuple[float, bool]:
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    log_probabilities_TV = logits_TV.to(wide).log_softmax(dim=-1)
    likelihood = log_probabilities_TV.gather(1, tokens_T[:, None]).sum().item()
    return likelihood, bool((logits_TV.argmax(dim=-1) == tokens_T).all())


def _until(tokens: Sequence[int], end: int) -> Sequence[int]:
    return tokens[: tokens.index(end)] if end in tokens else tokens
