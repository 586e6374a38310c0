"""Messages over one connection between two processes."""

import contextlib
import json
import os
import socket
import threading
import time
from typing import Any

LONGEST = 1 << 26
"""Maximum size in bytes of a message from a process of the run."""

_LONGEST_HELLO = 1 << 12  # maximum size in bytes of the first message on a connection
_SEND_S = 10.0  # time limit for the other end to take a message


class Link:
    """One end of a connection between two processes; a message is a line of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        """Takes over `connection`; the process at the other end has not identified itself yet."""
        self.rank = 0
        """Rank of the process at the other end."""
        self.who = ""
        """Its process id and host, for people."""
        self.heard = time.monotonic()
        """When it last sent something."""
        self.leaving = False
        """Whether it has announced that it will end."""
        self.longest = _LONGEST_HELLO
        """Maximum size of a message in bytes."""
        self.early: list[dict[str, Any]] = []
        """Messages that arrived with the first one, for a later listener."""
        self._connection = connection
        self._unread = b""
        self._sending = threading.Lock()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)

    def fileno(self) -> int:
        """Returns the file descriptor, for selectors."""
        return self._connection.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message. If the other end is gone, the next receive reports it."""
        self.send_line(line_of(message))

    def send_line(self, line: bytes) -> None:
        """Sends a message encoded by `line_of`."""
        with self._sending, contextlib.suppress(OSError):
            self._connection.settimeout(_SEND_S)
            self._connection.sendall(line)

    def receive(self, timeout_s: float = _SEND_S) -> list[dict[str, Any]] | None:
        """Waits for messages and returns them; None if the other end is gone or nothing arrives in time."""
        with contextlib.suppress(OSError, ValueError):
            self._connection.settimeout(max(timeout_s, 0.001))
            data = self._connection.recv(1 << 18)
            *lines, self._unread = (self._unread + data).split(b"\n")
            messages = [json.loads(line) for line in lines]
            if data and len(self._unread) <= self.longest and all(isinstance(message, dict) for message in messages):
                self.heard = time.monotonic()
                return messages
        return None

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()


def line_of(message: dict[str, Any]) -> bytes:
    """Encodes a message, once for all its recipients."""
    return json.dumps(message).encode() + b"\n"


def who_am_i() -> str:
    """Describes this process for people at another one."""
    return f"pid {os.getpid()} on {socket.gethostname()}"
