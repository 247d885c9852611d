"""Which failure can cause which."""

import pytest

from tsemon.errors import InvalidRules
from tsemon_server.incidents import ORDER, Order
from tsemon_server.rules import PACK

FAMILIES = {"decay": "norm", "collapse": "tse", "escalation": "tse", "spike": "loss"}


def order(*entries):
    lines = [f"  - {{causes: [{causes}], can_cause: [{can_cause}], because: b}}" for causes, can_cause in entries]
    return Order("order:\n" + "\n".join(lines), "order.yaml", FAMILIES)


class TestOrder:
    def test_takes_a_rule_for_itself_and_a_family_for_its_rules(self):
        known = order(("decay", "tse"), ("escalation", "collapse"))
        assert known.can_cause("decay", "collapse")
        assert known.can_cause("decay", "escalation")
        assert known.can_cause("escalation", "collapse")
        assert not known.can_cause("collapse", "decay")

    def test_does_not_let_a_cause_of_a_family_cause_itself(self):
        assert not order(("escalation", "tse")).can_cause("escalation", "escalation")

    def test_puts_causes_before_what_they_can_cause(self):
        known = order(("escalation", "collapse"), ("decay", "tse"))
        assert known.place("decay") < known.place("escalation") < known.place("collapse")

    def test_puts_rules_that_it_does_not_know_last(self):
        known = order(("decay", "tse"))
        assert known.place("a-rule-of-the-user") > known.place("spike")
        assert not known.can_cause("decay", "a-rule-of-the-user")

    def test_rejects_a_cycle_and_names_it(self):
        with pytest.raises(InvalidRules, match=r"a failure cannot cause itself: .*decay -> collapse"):
            order(("decay", "collapse"), ("collapse", "decay"))

    def test_rejects_names_that_it_does_not_know(self):
        with pytest.raises(InvalidRules, match="name of a built-in rule"):
            order(("decay", "collaps"))

    def test_rejects_entries_without_a_reason(self):
        with pytest.raises(InvalidRules, match="because"):
            Order("order: [{causes: [decay], can_cause: [tse]}]", "order.yaml", FAMILIES)


class TestTheBuiltInOrder:
    def test_says_of_each_rule_on_frames_what_it_causes_or_what_causes_it(self):
        for rule in (rule for rule in PACK if rule.family not in ("liveness", "custom") and rule.severity != "info"):
            others = [other.name for other in PACK if other is not rule]
            assert any(ORDER.can_cause(rule.name, one) or ORDER.can_cause(one, rule.name) for one in others), rule.name

    def test_has_states_samples_and_outputs_as_consequences_of_what_comes_before_them(self):
        for cause in ("weight-decay-outweighs-gradient", "token-similarity-escalation", "sequences-repeat"):
            for consequence in ("states-collapse", "samples-collapse", "output-ignores-input", "output-ignores-states"):
                assert ORDER.can_cause(cause, consequence)
                assert not ORDER.can_cause(consequence, cause)

    def test_lets_the_loss_cause_nothing(self):
        losses = [rule.name for rule in PACK if rule.family == "loss"]
        assert not any(ORDER.can_cause(loss, rule.name) for loss in losses for rule in PACK)

    def test_lets_updates_along_the_weights_cause_one_hot_attention_only_if_they_last(self):
        consequence = "attention-entropy-collapse"
        assert ORDER.can_cause("update-misalignment", consequence)
        assert not ORDER.can_cause("update-misalignment", consequence, lasts=False)

    def test_lets_a_block_that_was_scaled_cause_exploding_gradients_and_not_the_reverse(self):
        assert ORDER.can_cause("block-norm-jump", "exploding-gradient")
        assert not ORDER.can_cause("exploding-gradient", "block-norm-jump")
        assert ORDER.can_cause("updates-too-large", "block-norm-jump")
