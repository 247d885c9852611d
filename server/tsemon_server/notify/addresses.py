"""Which addresses anybody may be told at, and which only where the administrator says so."""

from __future__ import annotations

import ipaddress

_INTERNET = ipaddress.IPv6Network("2000::/3")
"""All that is given out of IPv6. What is elsewhere is local, or stands for an address of IPv4: ::a.b.c.d, ::ffff:a.b.c.d,
::ffff:0:a.b.c.d, 64:ff9b::a.b.c.d and 64:ff9b:1::a.b.c.d."""
_EMBEDDING = tuple(map(ipaddress.IPv6Network, ("2001::/32", "2002::/16")))
"""Within it, those of Teredo and 6to4: whoever translates them may reach a private network."""
_DOCUMENTATION = ipaddress.IPv6Network("3fff::/20")
_ISATAP = 0x0000_5EFE
"""Stands before an address of IPv4 in the lower half, in whichever network; with a bit more where that one is unique."""


def is_public(address: str) -> bool:
    """Whether the address is somewhere on the internet, and says so plainly."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address) and not _is_plain(found):
        return False
    return found.is_global and not found.is_multicast


def _is_plain(address: ipaddress.IPv6Address) -> bool:
    is_isatap = int(address) >> 32 & 0xFDFF_FFFF == _ISATAP
    is_other = any(address in network for network in (*_EMBEDDING, _DOCUMENTATION))
    return address in _INTERNET and not is_isatap and not is_other
