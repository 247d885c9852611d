"""Which addresses anybody may be told at, and which only where the administrator says so."""

from __future__ import annotations

import ipaddress

# An address of IPv4 in one of IPv6: whoever translates it may reach a private network.
_EMBEDDING = tuple(
    map(ipaddress.IPv6Network, ("::/96", "::ffff:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48", "2001::/32", "2002::/16"))
)


def is_public(address: str) -> bool:
    """Whether the address is somewhere on the internet, and says so plainly."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address) and any(found in network for network in _EMBEDDING):
        return False
    return found.is_global and not found.is_multicast
