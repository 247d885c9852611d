"""The private classes of uvicorn that limits/connections.py builds on are those for which it was written."""

import hashlib
import inspect
import tomllib
from pathlib import Path

import pytest
import uvicorn
from packaging.requirements import Requirement
from packaging.version import Version
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import Server, ServerState

CHECKED = Version("0.54.0")
"""The newest uvicorn whose classes were compared with what limits/connections.py needs of them."""

RELIED_ON = {
    HttpToolsProtocol: (
        "18fdf324b11bf160",
        "the constructor takes (config, server_state, app_state, _loop); asyncio calls connection_made, connection_lost, "
        "data_received and resume_writing, and httptools on_message_begin, on_headers_complete and on_message_complete, on "
        "the subclass; an exception in on_headers_complete becomes a 400; on_response_complete comes once per answer; "
        "`transport`, `loop`, `connections`, `pipeline` and `cycle` (the newest, or None) are what they were",
    ),
    RequestResponseCycle: (
        "e67d470d435dcc1c",
        "`response_started` and `response_complete` tell how far an answer is; `disconnected = True` and "
        "`message_event.set()` end a request whose client has gone",
    ),
    ServerState: ("f2260fbf10154746", "its constructor takes nothing, and `connections` are those that are open"),
    Server: (
        "06e799f7c58f8be6",
        "on_tick(counter) is called every 0.1 s and says whether to stop; `server_state` is handed to each connection",
    ),
}
"""The SHA-256 of the source, and what must hold of a class that has another one."""


def digest_of(kind):
    return hashlib.sha256(inspect.getsource(kind).encode()).hexdigest()[:16]


def what_to_check(kind, known):
    """Empty where the class is the one that was checked."""
    digest, needed = known
    if digest_of(kind) == digest:
        return ""
    return (
        f"uvicorn {uvicorn.__version__} has another {kind.__name__} than {CHECKED}, on which "
        f"server/tsemon_server/limits/connections.py relies. Compare the two, and check that {needed}. Run "
        "tests/faults/test_connections.py, tests/faults/test_stalled.py and tests/server/test_limits.py. Then set CHECKED "
        f"and the digest {digest_of(kind)} here, and the bound in pyproject.toml"
    )


class TestUvicorn:
    @pytest.mark.parametrize("kind", RELIED_ON)
    def test_has_the_classes_that_were_checked(self, kind):
        assert not (told := what_to_check(kind, RELIED_ON[kind])), told

    def test_of_another_kind_is_told_with_what_to_check(self):
        class HttpToolsProtocol:
            """Another one."""

        told = what_to_check(HttpToolsProtocol, ("0123456789abcdef", "`cycle` is what it was"))
        assert told.startswith(f"uvicorn {uvicorn.__version__} has another HttpToolsProtocol than 0.54.0, on which ")
        assert "`cycle` is what it was" in told

    def test_is_installed_for_users_up_to_the_version_that_was_checked(self):
        project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
        (needed,) = (
            requirement
            for requirement in map(Requirement, project["optional-dependencies"]["server"])
            if requirement.name == "uvicorn"
        )
        assert CHECKED in needed.specifier
        assert Version(uvicorn.__version__) in needed.specifier
        assert f"{CHECKED.major}.{CHECKED.minor + 1}" not in needed.specifier
