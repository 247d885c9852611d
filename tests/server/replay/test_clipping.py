"""A real training whose loop clips: from `attach` over its spool to the built-in rules."""

import pytest
import torch
from torch import nn

import tsemon
from tests import zoo
from tsemon_server.rules import PACK
from tsemon_server.rules.evaluator import Evaluator
from tsemon_server.services.replay.replaying import replay
from tsemon_server.services.replay.sources import find_sources

EXPLODES_AT = 50


def clip_by_norm(model):
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def clip_by_hand(model):
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    factor = 1.0 / max(1.0, torch.cat([gradient.flatten() for gradient in gradients]).norm().item())
    for gradient in gradients:
        gradient.mul_(factor)


def alerts_of(folder, clip, scale):
    """What fires on a language model whose gradient is `scale` times as large from some step on."""
    torch.manual_seed(0)
    model, _ = zoo.gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with tsemon.attach(
        model, optimizer, run="clipped", every=5, spool_dir=folder, measures=["total_grad_norm"]
    ) as monitor:
        for step in range(60):
            ids_BT = torch.randint(3, 90, (4, 12))
            loss = model(input_ids=ids_BT, labels=ids_BT).loss
            optimizer.zero_grad()
            (loss * (scale if step >= EXPLODES_AT else 1.0)).backward()
            clip(model)
            optimizer.step()
            monitor.step(loss=loss)
    assert monitor.status.faults == ()
    (source,) = find_sources([folder])
    return {alert.rule: alert.firing_step for alert in replay(source.open(), Evaluator(PACK)).alerts}


class TestATrainingThatClips:
    @pytest.mark.parametrize("clip", [clip_by_norm, clip_by_hand])
    def test_alerts_where_the_raw_gradient_explodes(self, clip, tmp_path):
        assert alerts_of(tmp_path, clip, 1e4)["exploding-gradient"] == EXPLODES_AT + 5

    def test_does_not_alert_in_health(self, tmp_path):
        assert "exploding-gradient" not in alerts_of(tmp_path, clip_by_norm, 1.0)
