"""The service of the demo, a process of its own."""

import io
import socket

from rich.console import Console

from tests.ports import free_port
from tsemon.lab.demo.service import service
from tsemon_client import Client


def test_takes_another_port_where_the_one_wanted_is_taken(tmp_path):
    wanted, told = free_port(), io.StringIO()
    with (
        socket.create_server(("127.0.0.1", wanted)),
        service(wanted, tmp_path / "demo.db", Console(file=told, width=200)) as (url, _),
        Client(url) as client,
    ):
        assert list(client.runs()) == []
        assert not url.endswith(f":{wanted}")
    assert url in told.getvalue()
