"""Messages over one connection between two processes."""

import contextlib
import json
import os
import socket
import threading
import time
from typing import Any

LONGEST = 1 << 26
"""Bytes that a message of a process of the run may have."""

_LONGEST_HELLO = 1 << 12  # bytes of a message of whoever knocks
_SEND_S = 10.0  # in which the other end must have taken what is sent


class Link:
    """One end of a connection between two processes; a message is a line of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        """Takes `connection`; the process at its other end has yet to say who it is."""
        self.rank = 0
        """Of the process at the other end."""
        self.who = ""
        """Its process id and host, for people."""
        self.heard = time.monotonic()
        """When it last sent something."""
        self.leaving = False
        """Whether it said that it will end."""
        self.longest = _LONGEST_HELLO
        """Bytes that a message may have."""
        self.early: list[dict[str, Any]] = []
        """What came with the first message, for whoever listens later."""
        self._connection = connection
        self._unread = b""
        self._sending = threading.Lock()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)

    def fileno(self) -> int:
        """For selectors."""
        return self._connection.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Sends; that the other end is gone shows where it is read."""
        self.send_line(line_of(message))

    def send_line(self, line: bytes) -> None:
        """Sends what `line_of` has made of a message."""
        with self._sending, contextlib.suppress(OSError):
            self._connection.settimeout(_SEND_S)
            self._connection.sendall(line)

    def receive(self, timeout_s: float = _SEND_S) -> list[dict[str, Any]] | None:
        """What has come, waiting for something to come; None when the other end is gone, or in time nothing came."""
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
        """Ends the connection."""
        self._connection.close()


def line_of(message: dict[str, Any]) -> bytes:
    """A message as it is sent, which is made once for all who get it."""
    return json.dumps(message).encode() + b"\n"


def who_am_i() -> str:
    """This process, for people at another."""
    return f"pid {os.getpid()} on {socket.gethostname()}"
