"""A message in the words of each kind of receiver."""

from __future__ import annotations

import email.utils
import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from email.message import EmailMessage
from email.policy import SMTP
from typing import Any, NamedTuple
from urllib.parse import urlencode

from tsemon_answers.alerts import CLEARED, Alert
from tsemon_server.notify.configuration import Alertmanager, Discord, Email, Receiver, Slack, Webhook
from tsemon_server.notify.messages import LEVELS, Message, Notice, evidence_of
from tsemon_server.notify.sending import NotInThread, Post, judge_forum, judge_slack, mail, post
from tsemon_server.store.ledger.incidents import NoticedIncident

COLOURS = {"info": 0x3B82F6, "warning": 0xF59E0B, "critical": 0xDC2626}
RESOLVED, ENDED = 0x16A34A, 0x6B7280


class Sent(NamedTuple):
    """Answer of the receiver, and the thread that the message is in if the receiver has threads."""

    told: str
    thread: str | None = None


def send(message: Message, receiver: Receiver) -> Sent:
    """Send the message, in its thread if there is one. Raises NotDelivered."""
    match receiver:
        case Email():
            return Sent(mail(as_mail(message, receiver), receiver))
        case Slack(channel=str()) | Discord(forum=True):
            return _send_in_thread(message, receiver)
        case Webhook():
            request = as_webhook(message, receiver)
        case Slack():
            request = as_slack(message, receiver)
        case Discord():
            request = as_discord(message, receiver)
        case Alertmanager():
            request = as_alerts(message, receiver)
    return Sent(post(request, allow_private=receiver.allow_private))


def _send_in_thread(message: Message, receiver: Slack | Discord) -> Sent:
    """Send the message outside of the thread if the receiver no longer has it, or if the channel is another one."""
    channel = receiver.channel if isinstance(receiver, Slack) else "forum"
    first_channel, _, thread = (message.thread or "").rpartition(" ")
    if first_channel != channel:  # Slack numbers the messages of each channel for itself
        thread = ""

    def post_to(thread: str) -> str:
        if isinstance(receiver, Slack):
            return post(as_slack(message, receiver, thread), judge_slack, allow_private=receiver.allow_private)
        return post(as_discord(message, receiver, thread), judge_forum, allow_private=receiver.allow_private)

    try:
        found = post_to(thread)
    except NotInThread:
        if not thread:
            raise
        thread, found = "", post_to("")
    thread = thread or found
    return Sent("answered 200", f"{channel} {thread}" if thread else None)


def as_webhook(message: Message, receiver: Webhook) -> Post:
    """JSON, signed where there is a secret."""
    about = [_about(message, notice) for notice in message.shown]
    body = _json(_whole(message, about) | {"num_alerts": len(message.notices), "alerts": about})
    headers = _authorized(receiver)
    if receiver.secret is not None:
        time = str(int(message.time.timestamp()))
        key = receiver.secret.get_secret_value().encode()
        signature = hmac.new(key, f"{time}.".encode() + body, hashlib.sha256).hexdigest()
        headers |= {"X-Tsemon-Timestamp": time, "X-Tsemon-Signature": f"sha256={signature}"}
    return Post(receiver.url.get_secret_value(), headers, body)


def _about(message: Message, notice: Notice) -> dict[str, Any]:
    alert = notice.alert
    return {
        "incident_id": alert.incident_id,
        "alert_id": alert.cause_id if isinstance(alert, NoticedIncident) else alert.alert_id,
        "state": notice.kind,
        "rule": alert.rule,
        "family": alert.family,
        "severity": alert.severity,
        "project": alert.project,
        "run": alert.run,
        "run_id": alert.run_id,
        "step": notice.step,
        **{name: getattr(alert, name, None) for name in ("blocks", "where", "left_step", "settles_step", "also_fired")},
        "summary": alert.summary,
        "evidence": evidence_of(alert),
        "advice": alert.advice,
        "url": message.url_of(notice),
    }


def _whole(message: Message, about: list[dict[str, Any]]) -> dict[str, Any]:
    """The keys that other tools read, and ours: what is not the same in all alerts is null."""
    is_one = len(message.notices) == 1
    common = {key: value if is_one else None for key, value in about[0].items()}
    common |= {key: message.common(key) for key in ("rule", "family", "project", "run", "run_id")}
    return common | {
        "level": LEVELS[message.severity] if message.is_alarming else "info",
        "title": message.title,
        "text": message.text,
        "timestamp": message.time.isoformat(),
        "state": message.state,
        "severity": message.severity,
        "url": message.url,
    }


def as_slack(message: Message, receiver: Slack, thread: str = "") -> Post:
    """Blocks beside a line in the colour of the severity. In a thread, the channel shows them, too."""
    blocks: list[dict[str, Any]] = [
        {"type": "header", "text": {"type": "plain_text", "text": _cut(f"{_label(message)} {message.title}", 150)}},
        {"type": "section", "text": {"type": "mrkdwn", "text": _cut(_for_slack(message.text), 3000)}},
    ]
    if message.links:
        links = "\n".join(f"<{url}|{_for_slack(_cut(name, 100))}>" for name, url in message.links)
        whole = links if len(links) <= 3000 else links[:3000].rpartition("\n")[0]
        blocks.append({"type": "section", "text": {"type": "mrkdwn", "text": whole}})
    text = _for_slack(f"{_label(message)} {message.title}")
    attachment = {"color": f"#{_colour(message):06x}", "fallback": _cut(text, 3000), "blocks": blocks}
    body: dict[str, Any] = {"attachments": [attachment]}
    if receiver.token is None:
        assert receiver.url is not None
        return Post(receiver.url.get_secret_value(), _JSON, _json(body))
    body |= {"channel": receiver.channel} | ({"thread_ts": thread, "reply_broadcast": True} if thread else {})
    headers = {"Authorization": f"Bearer {receiver.token.get_secret_value()}"}
    return Post(f"{receiver.api_url}/chat.postMessage", _JSON | headers, _json(body))


def _for_slack(text: str) -> str:
    # Whoever names a run writes into our message: `<!channel>` would ring for everybody.
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def as_discord(message: Message, receiver: Discord, thread: str = "") -> Post:
    """An embed in the colour of the severity. In a forum without a thread, it opens one."""
    links = "".join(f"\n[{_for_discord(_cut(name, 100))}]({url})" for name, url in message.links[1:] and message.links)
    embed = {
        "title": _cut(f"{_label(message)} {message.title}", 256),
        "description": _cut(_for_discord(message.text), 4096 - len(links)) + links,
        "color": _colour(message),
        "timestamp": message.time.isoformat(),
        "footer": {"text": f"tsemon, {message.severity}"},
    } | ({} if message.url is None else {"url": message.url})
    body: dict[str, Any] = {"embeds": [embed], "allowed_mentions": {"parse": []}}
    url = receiver.url.get_secret_value()
    if receiver.forum:
        url += ("&" if "?" in url else "?") + urlencode({"wait": "true"} | ({"thread_id": thread} if thread else {}))
        body |= {} if thread else {"thread_name": _cut(_on_one_line(message.title), 100)}
    return Post(url, _JSON, _json(body))


def _for_discord(text: str) -> str:
    return re.sub(r"([\\*_~`|>\[\]#<@])", r"\\\1", text)


def as_mail(message: Message, receiver: Email) -> EmailMessage:
    """Plain text. The messages on an incident are one thread; so are those on several runs of one rule and project."""
    mail = EmailMessage(SMTP.clone(max_line_length=250))  # or a title would begin on the line after its name
    mail["Subject"] = _cut(_on_one_line(f"{_label(message)} {message.title}"), 200)
    mail["From"] = receiver.sender
    mail["To"] = ", ".join(receiver.to)
    mail["Date"] = email.utils.format_datetime(message.time)
    domain = receiver.sender.rpartition("@")[2]
    mail["Message-ID"] = email.utils.make_msgid("tsemon", domain)
    run_id = message.common("run_id")
    incidents = sorted({notice.alert.incident_id for notice in message.notices if notice.alert.incident_id}, key=int)
    threads = [f"{run_id}-{incident_id}" for incident_id in incidents if run_id]
    threads = threads or ["-".join(_on_one_line(str(message.common(name))) for name in ("project", "rule"))]
    ids = [f"<tsemon-{hashlib.sha256(thread.encode()).hexdigest()[:24]}@{domain}>" for thread in threads]
    mail["In-Reply-To"], mail["References"] = ids[0], " ".join(ids)
    mail["Auto-Submitted"] = "auto-generated"
    links = "\n".join(url if len(message.links) == 1 else f"{name}: {url}" for name, url in message.links)
    parts = [message.title, message.text, *([links] if links else []), *_evidence_lines(message)]
    mail.set_content("\n\n".join(parts) + "\n")
    return mail


def _evidence_lines(message: Message) -> list[str]:
    if len(message.notices) != 1 or not (evidence := evidence_of(message.notices[0].alert)):
        return []
    return ["Evidence:\n" + "\n".join(f"  {name}: {_cut(json.dumps(value), 300)}" for name, value in evidence.items())]


def as_alerts(message: Message, receiver: Alertmanager) -> Post:
    """Include all incidents and alerts, because Alertmanager resolves those that it no longer receives."""
    url = receiver.url.get_secret_value().rstrip("/").removesuffix("/api/v2/alerts")
    body = _json([_as_alert(message, notice, receiver) for notice in message.notices])
    return Post(f"{url}/api/v2/alerts", _authorized(receiver), body)


def _as_alert(message: Message, notice: Notice, receiver: Alertmanager) -> dict[str, Any]:
    """Labels say which alert it is: what changes while it fires would make another of it."""
    alert = notice.alert
    # Nor would it tell anybody of what is over when it hears of it first.
    # A recovery may not last: it takes effect after the same time, unless the incident opens again.
    may_reopen = isinstance(alert, NoticedIncident) and alert.resolved_reason in CLEARED
    over = message.time + receiver.forgets_after if notice.is_alarming or may_reopen else alert.updated_at
    found = {
        "labels": _labels(alert, receiver.labels),
        "annotations": _annotations(notice),
        "startsAt": alert.opened_at.isoformat(),
        # It refuses what ends before it starts, as it seems to where somebody sets the clock back.
        "endsAt": max(over, alert.opened_at).isoformat(),
    }
    url = message.url_of(notice)
    return found if url is None else found | {"generatorURL": url}


def _labels(alert: Alert, labels: Mapping[str, str]) -> dict[str, str]:
    known = {name: getattr(alert, name) for name in ("incident_id", "run_id", "project", "run")}
    first = alert.labels if isinstance(alert, NoticedIncident) else {}
    rule, *others = (first.get(name, getattr(alert, name)) for name in ("rule", "family", "severity"))
    known |= {"alertname": rule} | dict(zip(("family", "severity"), others, strict=True))
    return {name: _clean(value) for name, value in {**labels, **known}.items() if value}


def _annotations(notice: Notice) -> dict[str, str]:
    alert = notice.alert
    found = {"summary": alert.summary, "step": str(notice.step), "evidence": json.dumps(evidence_of(alert))}
    if isinstance(alert, NoticedIncident):
        found |= {"cause": alert.rule, "worst": alert.severity, "also_fired": ", ".join(alert.also_fired)}
    found |= {"advice": alert.advice.get("text", ""), "source": alert.advice.get("source", "")}
    return {name: _clean(value) for name, value in found.items() if value}


def _clean(text: str) -> str:
    """Without what is no character, which would make it refuse all alerts that come with this one."""
    return text.encode("utf-8", "replace").decode()


def _label(message: Message) -> str:
    return f"[{message.severity}]" if message.is_alarming else "[ended]" if message.is_unrecovered else "[resolved]"


def _colour(message: Message) -> int:
    return COLOURS[message.severity] if message.is_alarming else ENDED if message.is_unrecovered else RESOLVED


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _on_one_line(text: str) -> str:
    return " ".join(text.split())


_JSON = {"Content-Type": "application/json"}


def _authorized(receiver: Webhook | Alertmanager) -> dict[str, str]:
    if receiver.authorization is None:
        return {**_JSON}
    return {**_JSON, "Authorization": receiver.authorization.get_secret_value()}


def _json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False).encode()
