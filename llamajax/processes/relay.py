"""A relay between jax and the coordinator that stays open longer than the coordinator."""

import contextlib
import socket
import threading
import time

_LINGER_S = 8.0  # time for which jax does not notice a closed connection: longer than a process needs to report its end


def relay(coordinator: tuple[str, int]) -> str:
    """Returns the address of a socket on this machine that forwards to `coordinator`.

    Its connections outlive the coordinator's by some seconds, so that this process can end with its own message.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")  # Linux chooses a name that is not a file
    listener.listen()

    def accept() -> None:
        while True:
            near, _ = listener.accept()
            threading.Thread(target=connect, args=(near,), name="relay", daemon=True).start()

    def connect(near: socket.socket) -> None:
        while True:
            try:
                far = socket.create_connection(coordinator)
                break
            except OSError:  # jax does not listen there yet
                time.sleep(0.05)
        threading.Thread(target=pump, args=(near, far, 0), name="relay", daemon=True).start()
        pump(far, near, _LINGER_S)

    def pump(source: socket.socket, sink: socket.socket, close_after_s: float) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        time.sleep(close_after_s)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=accept, name="relay", daemon=True).start()
    return f"unix-abstract:{listener.getsockname()[1:].decode()}"
