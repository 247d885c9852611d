"""The routes by which people read, edit and try rules."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Path, Request
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from starlette.concurrency import run_in_threadpool

from tsemon.errors import InvalidArgument, InvalidDocument, InvalidRules, UnknownRun
from tsemon.wire import MAX_BLOCKS, MAX_BODY_BYTES
from tsemon_server.access.gate import access_of
from tsemon_server.alerts.active import ActiveRules
from tsemon_server.alerts.rulebook import Rulebook, one_rule
from tsemon_server.alerts.standing import RuleStandings, standings
from tsemon_server.bodies import Body, read_body, read_raw, takes
from tsemon_server.ingest import FrameBody, to_frame
from tsemon_server.replay import Attempt, Recording, replay
from tsemon_server.replay.stored import StoredRun
from tsemon_server.rules import MAX_CHARACTERS, Evaluator, load
from tsemon_server.rules.explaining import explain
from tsemon_server.rules.views import views_of
from tsemon_server.store import Record, RuleVersion, Run, Store

MAX_RULES_BYTES = 4 * MAX_CHARACTERS
MAX_TRIED_FRAMES = 10_000
"""That come in a body."""
MAX_TRIED_STORED_FRAMES = 100_000

RuleName = Annotated[str, Path(description="The rule's name.", max_length=128)]
RunId = Annotated[str, Path(description="The run's id, as the registration answered it.", max_length=64)]
YAML: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/yaml": {"schema": {"type": "string", "description": "A rule file, as YAML or JSON."}}},
    }
}


class ExplainedLine(Record):
    """One line of a condition, as people read it."""

    depth: int
    """How far it is indented: it belongs to the last line above it that is less so."""
    text: str
    """A comparison, or what joins the lines below it."""


class ExplainedHold(Record):
    """How long something must last: both of them."""

    samples: int
    """So many samples in a row."""
    steps: int
    """So many steps from the first to the last of them; of a rule that reads the clock, seconds."""


class ExplainedRule(Record):
    """A rule in words and whole: with what its definition leaves to the defaults."""

    watches: list[str]
    """The metrics that it reads to be met."""
    when: list[ExplainedLine]
    """When it is met."""
    hold: ExplainedHold
    """For how long it must be met before it fires."""
    clear: list[ExplainedLine]
    """When it is over; none where that is when it is not met."""
    clear_hold: ExplainedHold
    """For how long it must be over before it is resolved."""
    only_while: list[ExplainedLine]
    """While it is judged; none for always."""
    after: ExplainedHold
    """How much of an attempt it lets pass before it is judged."""


class Rules(Record):
    """The rules that the service knows."""

    rules: list[RuleVersion]
    """The newest version of each, also of those that are disabled, by name."""
    explained: dict[str, ExplainedRule]
    """By name what each says. One that was written for another version of tsemon is not among them."""


class RuleHistory(Record):
    """What a rule was from when on."""

    versions: list[RuleVersion]
    """All versions, the newest first: that one is in force."""


class RuleTest(Body):
    """What rules would have said of a run, or of frames."""

    run_id: Annotated[str, Field(max_length=64)] | None = None
    """A run whose frames are stored."""
    frames: Annotated[list[FrameBody], Field(max_length=MAX_TRIED_FRAMES)] | None = None
    """Or frames, in any order."""
    num_blocks: Annotated[int, Field(ge=0, le=MAX_BLOCKS)] = 0
    """With `frames`: the model's depth, against which the shapes of arrays are held."""
    frozen_blocks: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_BLOCKS)] = []  # noqa: RUF012
    """With `frames`: indexes of the blocks that are not trained, on purpose."""
    rules: Annotated[str, Field(max_length=MAX_CHARACTERS)] | None = None
    """A rule file, as YAML or JSON; without it, the rules that are in force."""

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if (self.run_id is None) == (self.frames is None):
            raise PydanticCustomError("one_of_both", "Either run_id or frames should be given")
        return self


class TriedAlert(Record):
    """An alert that the rules would have raised."""

    rule: str
    """The rule."""
    family: str
    """The kind of trouble that it looks for."""
    severity: Literal["info", "warning", "critical"]
    """How bad that is."""
    pending_step: int
    """The step at which its condition was first met."""
    firing_step: int
    """The step at which it had held for long enough."""
    resolved_step: int | None
    """The step at which it was over; null where it fires to the end."""
    summary: str
    """One sentence for people."""
    evidence: dict[str, Any]
    """What the rule saw when it fired."""
    advice: dict[str, str]
    """What to try (`text`), and where that comes from (`source`)."""


class Tried(Record):
    """What the rules would have said."""

    alerts: list[TriedAlert]
    """What would have fired, in that order."""
    num_frames: int
    """How many frames the rules have read."""
    problems: list[str]
    """What of the run they could not see."""


BODIES: tuple[type[Body], ...] = (RuleTest,)


def make_router(store: Store, rulebook: Rulebook, active: ActiveRules) -> APIRouter:
    """Routes that read and edit the rules that `rulebook` has in `store`, and try them."""
    router = APIRouter(tags=["rules"])

    explained: dict[str, ExplainedRule] = {}
    """By digest: reading a definition takes longer than all else here."""

    def newest() -> Rules:
        with store.read() as reader:
            rules = rulebook.newest(reader.rules)
        return Rules(rules=rules, explained=_explained(rules, explained))

    def history(name: str) -> RuleHistory:
        with store.read() as reader:
            return RuleHistory(versions=rulebook.versions(reader.rules, name))

    @router.get("/rules")
    def list_rules() -> Rules:
        """The rules that the service knows."""
        return newest()

    @router.put("/rules", openapi_extra=YAML)
    async def put_rules(request: Request) -> Rules:
        """Put the rules of a file in force; others stay as they are. All of them, or none where one is wrong."""
        raw = await read_raw(request, MAX_RULES_BYTES)

        def put() -> Rules:
            rules = load(_text(raw), "body")
            with store.write() as writer:
                rulebook.edit(writer.rules, rules)
            return newest()

        return await run_in_threadpool(put)

    @router.post("/rules/test", openapi_extra=takes(RuleTest))
    async def test_rules(request: Request) -> Tried:
        """What rules would have said of a stored run, or of frames. Nothing is kept of it."""
        raw = await read_raw(request, MAX_BODY_BYTES)

        def test() -> Tried:
            body = read_body(RuleTest, raw)
            with store.read() as reader:
                given = None if body.rules is None else Evaluator(load(body.rules, "rules"))
                evaluator = active.of(reader.rules).evaluator if given is None else given
                if body.run_id is not None:
                    run = reader.runs.get(body.run_id)
                    if not access_of(request).is_for(run.project):
                        raise UnknownRun(f"no run has the id {body.run_id!r}; the list of runs has those there are")
                    _check_length(run)
                    return _tried(StoredRun(reader, body.run_id), evaluator)
            return _tried(_Sent(body), evaluator)

        return await run_in_threadpool(test)

    @router.get("/rules/{name}")
    def describe_rule(name: RuleName) -> RuleHistory:
        """All versions of one rule."""
        return history(name)

    @router.put("/rules/{name}", openapi_extra=YAML)
    async def put_rule(name: RuleName, request: Request) -> RuleHistory:
        """Put a rule in force: a new one, or in place of the one of its name. What it is to be already is left."""
        raw = await read_raw(request, MAX_RULES_BYTES)

        def put() -> RuleHistory:
            rule = one_rule(_text(raw), name)
            with store.write() as writer:
                rulebook.edit(writer.rules, [rule])
            return history(name)

        return await run_in_threadpool(put)

    @router.delete("/rules/{name}")
    def disable_rule(name: RuleName) -> RuleHistory:
        """Let a rule look at no run any more; what it has opened is over. Its versions stay."""
        with store.write() as writer:
            rulebook.disable(writer, name)
        return history(name)

    @router.post("/rules/{name}/restore")
    def restore_rule(name: RuleName) -> RuleHistory:
        """Put a built-in rule in force as it came."""
        with store.write() as writer:
            rulebook.restore(writer.rules, name)
        return history(name)

    @router.get("/runs/{run_id}/rules")
    def describe_standings(run_id: RunId) -> RuleStandings:
        """How each rule that is in force stands on a run."""
        with store.read() as reader:
            return standings(reader, active.of(reader.rules), run_id)

    return router


def _explained(versions: Sequence[RuleVersion], known: dict[str, ExplainedRule]) -> dict[str, ExplainedRule]:
    """Of what is not `known` yet it is, too, afterwards."""
    for version in versions:
        if version.digest in known:
            continue
        with suppress(InvalidDocument, InvalidRules):
            (rule,) = load(json.dumps({"rules": [version.definition]}), version.name)
            known[version.digest] = ExplainedRule.model_validate(explain(rule), from_attributes=True)
    return {version.name: known[version.digest] for version in versions if version.digest in known}


class _Sent:
    """Frames of a request, as a recording."""

    name = "frames"

    def __init__(self, body: RuleTest) -> None:
        self.problems: list[str] = []
        self._frames = [to_frame(sent, body.num_blocks) for sent in body.frames or ()]
        self._frozen = frozenset(body.frozen_blocks)

    def attempts(self) -> Iterator[Attempt]:
        yield Attempt(0, views_of(self._frames, self._frozen))


def _check_length(run: Run) -> None:
    if run.num_frames > MAX_TRIED_STORED_FRAMES:
        raise InvalidArgument(
            f"expected a run of at most {MAX_TRIED_STORED_FRAMES} frames, got one of {run.num_frames}, for which others "
            "would have to wait too long; `tsemon replay --database` tries rules on runs of any length"
        )


def _tried(recording: Recording, evaluator: Evaluator) -> Tried:
    replayed = replay(recording, evaluator)
    return Tried(
        alerts=[TriedAlert.model_validate(alert, from_attributes=True) for alert in replayed.alerts],
        num_frames=replayed.num_frames,
        problems=list(replayed.problems),
    )


def _text(raw: bytes | bytearray) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"body: expected a rule file in UTF-8, got something else ({error.reason})") from None
