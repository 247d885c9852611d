"""One message to one receiver, against real ones on loopback."""

import socket
import time
from email.message import EmailMessage

import pytest

from tests.server.notify.receivers import (
    DrippingMailServer,
    HttpReceiver,
    MailReceiver,
    SilentServer,
    drip,
    hang,
    hang_up,
    say_nonsense,
)
from tsemon_server.notify.addresses import is_public
from tsemon_server.notify.configuration import Email
from tsemon_server.notify.sending import MAX_RETRY_AFTER_S, NotDelivered, Post, mail, post

SECRET_PATH = "/services/T0/B0/secret"


def send(url, timeout_s=20.0, allow_private=True):
    return post(Post(url + SECRET_PATH, {"X-Ours": "1"}, b"{}"), allow_private=allow_private, timeout_s=timeout_s)


def refused(url, **options):
    """Why it was not delivered; what is secret is not in it."""
    with pytest.raises(NotDelivered) as caught:
        send(url, **options)
    assert caught.value.__cause__ is None
    for secret in ("secret", "T0", url, url.rpartition(":")[2]):
        assert secret not in str(caught.value)
    return caught.value


class TestAPost:
    def test_arrives(self, http):
        assert send(http.url) == "answered 200"
        (request,) = http.requests
        assert (request.path, request.body, request.headers["X-Ours"]) == (SECRET_PATH, b"{}", "1")
        assert request.headers["Host"] == http.url.removeprefix("http://")

    def test_keeps_the_query(self, http):
        post(Post(f"{http.url}?key=1", {}, b""), allow_private=True)
        assert http.requests[0].path == "/?key=1"

    @pytest.mark.parametrize("status", [200, 201, 202, 204])
    def test_is_delivered_with_a_good_status(self, http, status):
        http.answers = [status]
        assert send(http.url) == f"answered {status}"

    @pytest.mark.parametrize(
        ("status", "is_final"),
        [(400, True), (413, True), (422, True), (401, False), (404, False), (408, False), (500, False), (502, False)],
    )
    def test_is_given_up_where_it_is_the_message_that_is_wrong(self, http, status, is_final):
        http.answers = [status]
        error = refused(http.url)
        assert (str(error), error.is_final, error.retry_after_s) == (f"answered {status}", is_final, 0.0)

    @pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
    def test_is_not_sent_on_to_where_a_redirect_leads(self, http, listen, status):
        other = listen()
        http.answers = [(status, {"Location": other.url})]
        assert str(refused(http.url)).startswith(f"answered {status}: redirects are not followed")
        assert other.requests == []

    def test_waits_for_as_long_as_the_receiver_says(self, http):
        in_an_hour = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 1800))
        told = ["30", in_an_hour, "1000000", "Thu, 01 Jan 1970 00:00:00 GMT", "soon", "-5"]
        http.answers = [(429, {"Retry-After": value}) for value in told]
        waits = [refused(http.url).retry_after_s for _ in told]
        assert waits[0] == 30.0
        assert 1700 < waits[1] <= 1800
        assert waits[2:] == [MAX_RETRY_AFTER_S, 0.0, 0.0, 0.0]

    def test_fails_where_nobody_listens(self, listen):
        server = listen(SilentServer)
        server.close()
        assert str(refused(server.url)) == "no connection (Connection refused)"

    @pytest.mark.parametrize("answer", [hang, drip])
    def test_takes_no_longer_than_its_time_as_a_whole(self, http, answer):
        http.answers = [answer]
        assert str(refused(http.url, timeout_s=0.3)) == "no answer within 0.3 s"

    def test_ends_where_nobody_answers_the_call_for_encryption(self, listen):
        server = listen(SilentServer)
        assert str(refused(server.url.replace("http", "https"), timeout_s=0.3)) == "no answer within 0.3 s"

    @pytest.mark.parametrize("answer", [hang_up, say_nonsense])
    def test_fails_where_the_answer_is_none(self, http, answer):
        http.answers = [answer]
        assert str(refused(http.url)).startswith("the connection ended, or what came was no answer")

    def test_fails_where_the_name_is_unknown(self):
        assert str(refused("http://nobody.invalid:80")).startswith("its name is not known")

    def test_is_not_sent_where_the_name_took_all_its_time(self, http, monkeypatch):
        real = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", lambda *where, **how: time.sleep(0.3) or real(*where, **how))
        assert str(refused(http.url, timeout_s=0.2)) == "no answer within 0.2 s"
        assert http.requests == []

    def test_goes_over_https_to_who_can_prove_who_it_is(self, listen, certificate, monkeypatch):
        path, tls = certificate
        receiver = listen(HttpReceiver, tls=tls)
        assert str(refused(receiver.url)).startswith("its certificate is not trusted (self")
        assert receiver.requests == []
        monkeypatch.setenv("SSL_CERT_FILE", str(path))
        assert send(receiver.url) == "answered 200"
        other_name = receiver.url.replace("127.0.0.1", "localhost")
        assert str(refused(other_name)).startswith("its certificate is not trusted (Hostname mismatch); ")

    def test_goes_past_the_proxies_of_the_environment(self, http, listen, monkeypatch):
        proxy = listen()
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        assert send(http.url) == "answered 200"
        assert (len(http.requests), proxy.requests) == (1, [])


class TestAPrivateAddress:
    def test_gets_nothing(self, http):
        error = refused(http.url, allow_private=False)
        assert str(error).startswith("its address is private or local; say allow_private: true")
        assert http.requests == []

    def test_gets_not_even_a_greeting(self, listen):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(20)
            refused(f"https://127.0.0.1:{listener.getsockname()[1]}", allow_private=False)
            connected, _ = listener.accept()
            with connected:
                assert connected.recv(1) == b""

    @pytest.mark.parametrize("answers", [[("192.0.2.1",), ("127.0.0.1",)], [("192.0.2.1", "127.0.0.1")]])
    def test_gets_nothing_where_its_name_meant_another_a_moment_ago(self, http, monkeypatch, answers):
        """Rebinding: the name is looked up once for a message, and nothing that was found out of it before counts."""
        asked, real = [], socket.getaddrinfo

        def look_up(host, port, **options):
            asked.append(host)
            addresses = answers[min(len(asked), len(answers)) - 1]
            return [entry for address in addresses for entry in real(address, port, **options)]

        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        for _ in answers:
            error = refused(http.url.replace("127.0.0.1", "rebinds.example"), allow_private=False, timeout_s=2)
        assert str(error).startswith("its address is private")
        assert asked == ["rebinds.example"] * len(answers)
        assert http.requests == []

    def test_is_told_by_the_connection_and_not_by_its_name(self, http):
        """`localhost` today, a public address a moment ago: what counts is who answers."""
        url = http.url.replace("127.0.0.1", "localhost")
        assert str(refused(url, allow_private=False)).startswith("its address is private")
        assert http.requests == []

    @pytest.mark.parametrize(
        "address",
        ["127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
         "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff0e::1", "::ffff:127.0.0.1",
         "::ffff:8.8.8.8", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::7f00:1", "2002:7f00:1::", "2001:0:1::1",
         "::ffff:0:127.0.0.1", "64:ff9b::8.8.8.8", "2606:4700::5efe:7f00:1", "2606:4700::200:5efe:10.0.0.1", "3fff::1",
         "2001:db8::1", "5f00::1", "fec0::1", "100::1", "192.0.2.1", "198.18.0.1", "240.0.0.1"],
    )  # fmt: skip
    def test_is_any_that_may_lead_inside(self, address):
        assert not is_public(address)

    @pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "2a00::5efe"])
    def test_is_no_address_on_the_internet(self, address):
        assert is_public(address)


def letter():
    message = EmailMessage()
    message["Subject"], message["From"], message["To"] = "hello", "tsemon@example.org", "you@example.org"
    message.set_content("text")
    return message


def to(receiver, **fields):
    where = {"host": "127.0.0.1", "port": receiver.port, "security": "none", "allow_private": True}
    whom = {"from": "tsemon@example.org", "to": ["you@example.org", "them@example.org"]}
    return Email.model_validate({"name": "mail", "type": "email"} | where | whom | fields)


def mail_refused(receiver, timeout_s=20.0, **fields):
    with pytest.raises(NotDelivered) as caught:
        mail(letter(), to(receiver, **fields), timeout_s)
    assert "secret" not in str(caught.value)
    return caught.value


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of the server, which forgets connections under TLS
class TestAMail:
    def test_arrives(self, mailbox):
        assert mail(letter(), to(mailbox)) == "took the mail"
        ((sender, receivers, message),) = mailbox.mails
        assert (sender, receivers) == ("tsemon@example.org", ["you@example.org", "them@example.org"])
        assert message["Subject"] == "hello"

    @pytest.mark.filterwarnings("ignore:Requiring AUTH")  # the server does not see that all is encrypted
    @pytest.mark.parametrize("security", ["starttls", "tls"])
    def test_is_encrypted_and_logged_in(self, listen, certificate, monkeypatch, security):
        path, tls = certificate
        options = {"tls": tls, "is_tls_from_the_start": security == "tls", "password": "very-secret"}
        mailbox = listen(MailReceiver, **options)
        how = {"security": security, "user": "tsemon", "password": "very-secret"}
        monkeypatch.setenv("SSL_CERT_FILE", str(path))
        assert mail(letter(), to(mailbox, **how)) == "took the mail"
        error = mail_refused(mailbox, **how | {"password": "wrong-secret"})
        assert (str(error), error.is_final) == ("answered 535 to the login", False)
        assert set(mailbox.logins) == {(b"tsemon", b"very-secret"), (b"tsemon", b"wrong-secret")}
        assert len(mailbox.mails) == 1

    def test_does_not_go_to_who_cannot_prove_who_it_is(self, listen, certificate):
        server = listen(HttpReceiver, tls=certificate[1])  # it comes no further than TLS, so any server does
        assert str(mail_refused(server, security="tls")).startswith("its certificate is not trusted (self")

    def test_does_not_go_in_the_open_where_it_should_be_encrypted(self, mailbox):
        assert str(mail_refused(mailbox, security="starttls")) == "it offers no STARTTLS, or no login"
        assert mailbox.mails == []

    @pytest.mark.parametrize(("answer", "is_final"), [("451 secret reason", False), ("554 secret reason", True)])
    def test_is_given_up_where_it_is_the_mail_that_is_wrong(self, mailbox, answer, is_final):
        mailbox.answers = [answer]
        error = mail_refused(mailbox)
        assert (str(error), error.is_final) == (f"answered {answer[:3]}", is_final)

    def test_does_not_go_to_a_private_address(self, mailbox):
        assert str(mail_refused(mailbox, allow_private=False)).startswith("its address is private")

    @pytest.mark.parametrize("kind", [SilentServer, DrippingMailServer])
    def test_takes_no_longer_than_its_time_as_a_whole(self, listen, kind):
        assert str(mail_refused(listen(kind), timeout_s=0.3)) == "no answer within 0.3 s"

    def test_is_late_too_where_its_socket_says_so_before_the_clock_does(self, listen, monkeypatch):
        """smtplib makes of it that the connection was closed."""
        monkeypatch.setattr("tsemon_server.notify.sending._Line._cut", lambda _: None)
        assert str(mail_refused(listen(SilentServer), timeout_s=0.3)) == "no answer within 0.3 s"

    def test_fails_where_nobody_listens(self):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        nobody = type("Nobody", (), {"port": port})
        assert str(mail_refused(nobody)) == "no connection (Connection refused)"
