"""Rules: reading, editing and testing them."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from starlette.concurrency import run_in_threadpool

from tsemon.errors import Forbidden, InvalidArgument
from tsemon.wire import MAX_BODY_BYTES
from tsemon_answers.rules import CheckedRule, RuleHistory, Rules, RulesQuery, RuleStandings, Tried
from tsemon_server.access.gate import access_of
from tsemon_server.access.needs import needs
from tsemon_server.alerts.standing import standings
from tsemon_server.routes.openapi import takes
from tsemon_server.routes.reading import read_raw
from tsemon_server.routes.signature import Asked, RuleName, RunId, TheActiveRules, TheRulebook, TheStore, api_router
from tsemon_server.rules.documents import MAX_CHARACTERS
from tsemon_server.services import checks, trials

MAX_RULES_BYTES = 4 * MAX_CHARACTERS
YAML: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/yaml": {
                "schema": {"type": "string", "format": "binary", "description": "A rule file, as YAML or JSON."}
            }
        },
    }
}

router = api_router("rules")


@router.get("/rules")
@needs("read", of="project")
def list_rules(request: Request, store: TheStore, rulebook: TheRulebook, query: Asked[RulesQuery]) -> Rules:
    """The rules that the service knows."""
    return rulebook.rules(store, query.project, access_of(request).is_for)


@router.put("/rules", openapi_extra=YAML)
@needs("admin", of="body")
async def put_rules(request: Request, store: TheStore, rulebook: TheRulebook, query: Asked[RulesQuery]) -> Rules:
    """Put the rules of a file in force; others stay as they are. All of them, or none where one is wrong."""
    _check_access(request, query.project)
    raw = await read_raw(request, MAX_RULES_BYTES)
    await run_in_threadpool(lambda: rulebook.put(store, _text(raw), query.project))
    return await run_in_threadpool(rulebook.rules, store, query.project, access_of(request).is_for)


@router.post("/rules/test")
@needs("read", of="body")
@takes(trials.RuleTest)
async def test_rules(request: Request, store: TheStore, active: TheActiveRules) -> Tried:
    """What rules would have said of a stored run, or of frames. Nothing is kept of it."""
    raw = await read_raw(request, MAX_BODY_BYTES)
    return await run_in_threadpool(trials.test, store, active, raw, access_of(request).project)


@router.post("/rules/check", openapi_extra=YAML)
@needs("read")
async def check_rule(request: Request) -> CheckedRule:
    """Whether a rule can be read: its mistakes, each with its place, or the rule in words. Nothing is kept of it."""
    raw = await read_raw(request)
    return await run_in_threadpool(lambda: checks.check(_text(raw)))


@router.get("/rules/{name}")
@needs("read", of="project")
def describe_rule(name: RuleName, store: TheStore, rulebook: TheRulebook, query: Asked[RulesQuery]) -> RuleHistory:
    """All versions of one rule."""
    return rulebook.history(store, name, query.project)


@router.put("/rules/{name}", openapi_extra=YAML)
@needs("admin", of="body")
async def put_rule(
    name: RuleName, request: Request, store: TheStore, rulebook: TheRulebook, query: Asked[RulesQuery]
) -> RuleHistory:
    """Put a rule in force: a new one, or in place of the one of its name. What it is to be already is left."""
    _check_access(request, query.project)
    raw = await read_raw(request, MAX_RULES_BYTES)
    return await run_in_threadpool(lambda: rulebook.put_one(store, name, _text(raw), query.project))


@router.delete("/rules/{name}")
@needs("admin", of="body")
def disable_rule(
    name: RuleName, request: Request, store: TheStore, rulebook: TheRulebook, query: Asked[RulesQuery]
) -> RuleHistory:
    """Let a rule look at no run any more; what it has opened is over. Its versions stay."""
    _check_access(request, query.project)
    with store.write() as writer:
        rulebook.disable(writer, name, query.project)
    return rulebook.history(store, name, query.project)


@router.post("/rules/{name}/restore")
@needs("admin", of="body")
def restore_rule(
    name: RuleName, request: Request, store: TheStore, rulebook: TheRulebook, query: Asked[RulesQuery]
) -> RuleHistory:
    """Put a built-in rule in force as it came; in a project, the server's rule."""
    _check_access(request, query.project)
    with store.write() as writer:
        rulebook.restore(writer, name, query.project)
    return rulebook.history(store, name, query.project)


@router.get("/runs/{run_id}/rules")
@needs("read", "ingest", of="run")  # a writer asks which rules cannot fire yet
def list_rule_standings(run_id: RunId, store: TheStore, active: TheActiveRules) -> RuleStandings:
    """How each rule that is in force stands on a run."""
    with store.read() as reader:
        return standings(reader, active, run_id)


def _check_access(request: Request, project: str | None) -> None:
    """Raises Forbidden if the token is for one project and the rules count elsewhere."""
    access = access_of(request)
    if not access.is_for(project):
        wanted = "the server's rules" if project is None else f"rules of {project!r}"
        raise Forbidden(
            f"the token may change the rules of project {access.project!r} alone (project={access.project}), got {wanted}"
        )


def _text(raw: bytes | bytearray) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"body: expected a rule file in UTF-8, got something else ({error.reason})") from None
