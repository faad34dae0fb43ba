"""Two machines on one: network namespaces joined by a pair of virtual interfaces, and an ``ssh`` between them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

__all__ = ["TwoNodes", "why_not"]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def why_not() -> str:
    """Return why this machine cannot create namespaces; empty if it can."""
    if shutil.which("ip") is None:
        return "the command `ip` is not there (iproute2)"
    name = f"st{os.getpid()}x"
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except subprocess.CalledProcessError as error:
        return str(error.stderr).strip()
    return ""


class TwoNodes:
    """Within, there are two machines with one link between them.

    Args:
        folder: Where the hostfile and the ``ssh`` are written.
    """

    addresses = ("10.77.0.1", "10.77.0.2")

    def __init__(self, folder: Path) -> None:
        self.names = (f"st{os.getpid()}a", f"st{os.getpid()}b")
        self.links = (f"v{os.getpid()}a", f"v{os.getpid()}b")
        self.hostfile = folder / "hosts"
        self._ssh = folder / "ssh"

    def __enter__(self) -> TwoNodes:
        try:
            self._join()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _join(self) -> None:
        for name in self.names:
            _ip("netns", "add", name)
        _ip("link", "add", self.links[0], "type", "veth", "peer", "name", self.links[1])
        for name, link, address in zip(self.names, self.links, self.addresses, strict=True):
            _ip("link", "set", link, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", link, "up")
        self.hostfile.write_text("".join(f"{address} slots=1\n" for address in self.addresses))
        cases = "".join(f"{a}) name={n};; " for a, n in zip(self.addresses, self.names, strict=True))
        refuse = '*) echo "ssh: connect to host $1 port 22: No route to host" >&2; exit 255;; '
        self._ssh.write_text(f'#!/bin/sh\ncase "$1" in {cases}{refuse}esac\nexec ip netns exec "$name" sh -c "$2"\n')
        self._ssh.chmod(0o755)

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables of a launcher."""
        return {"STREAMTUNE_SSH": str(self._ssh)}

    def on_first(self, *command: str) -> list[str]:
        """Return the command that runs on the first machine."""
        return ["ip", "netns", "exec", self.names[0], *command]

    def block_process_group(self) -> None:
        """Drop all TCP packets of the first machine, except those of the watchdog's connections."""
        rule = ("-n", self.names[0], "rule", "add", "ipproto", "tcp")
        _ip(*rule, "priority", "1", "iif", "lo", "sport", "15000-24999", "lookup", "main")
        _ip(*rule, "priority", "2", "iif", "lo", "dport", "25000-65534", "blackhole")

    def cut(self) -> None:
        """Disable the link."""
        _ip("-n", self.names[1], "link", "set", self.links[1], "down")
