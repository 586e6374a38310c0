"""jax's way to the coordinator, which ends later than the coordinator does."""

import contextlib
import socket
import threading
import time

_LINGER_S = 8.0  # for which jax does not notice that its connection has ended: longer than a process's last words take


def relay(coordinator: tuple[str, int]) -> str:
    """The address of a socket within this machine through which `coordinator` is reached.

    Its connections outlive the coordinator's by some seconds, in which this process ends in its own words.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")  # Linux gives it a name of its own, which is no file
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
