"""Numbers with units, for people."""

from datetime import timedelta


def format_bytes(num_bytes: float) -> str:
    """Returns `1.50 GiB`; binary units, three significant digits."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 1000 or unit == "TiB":
            break
        num_bytes /= 1024
    decimals = 0 if unit == "B" or num_bytes >= 100 else 1 if num_bytes >= 10 else 2
    return f"{num_bytes:.{decimals}f} {unit}"


def format_count(count: float) -> str:
    """Returns `6.74B`; thousands, millions, billions, trillions, three significant digits."""
    for unit in ("", "k", "M", "B", "T"):
        if count < 999.5 or unit == "T":
            break
        count /= 1000
    return f"{count:.3g}{unit}" if count < 999.5 else f"{count:,.0f}{unit}"


def format_duration(seconds: float) -> str:
    """Returns `0:00:07`, `3:25:45`, `2 days 3:25:45`."""
    return str(timedelta(seconds=round(seconds))).replace(",", "")
