"""A slow cable between two network interfaces that this program makes: python -m network_full.wire FIRST SECOND.

It is what `tc ... netem` does where the kernel has that; it needs nothing but /dev/net/tun.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time

RATE, DELAY, LOSS = 250_000, 0.1, 0.001  # bytes per second, seconds, share of packets; each way
WAITING = 1.0  # seconds of packets that wait in front of the cable; others are dropped
SET, TAP = 0x400454CA, 0x1002  # of linux/if_tun.h: TUNSETIFF, and IFF_TAP | IFF_NO_PI
LONGEST = 1 << 16


def interface(name: str) -> int:
    """Make an interface; what is sent to it can be read here."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, SET, struct.pack("16sH14x", name.encode(), TAP))
    return file


def carry(first: int, second: int) -> None:
    """Carry packets in both directions, for ever."""
    draw, other = random.Random(0), {first: second, second: first}
    free = {first: 0.0, second: 0.0}  # when the last packet from this side is on the cable
    arriving: list[tuple[float, int, bytes]] = []
    while True:
        wait = max(0.0, arriving[0][0] - time.monotonic()) if arriving else None
        ready, _, _ = select.select([first, second], [], [], wait)
        now = time.monotonic()
        for side in ready:
            packet = os.read(side, LONGEST)
            if draw.random() >= LOSS and free[side] - now < WAITING:
                free[side] = max(now, free[side]) + len(packet) / RATE
                heapq.heappush(arriving, (free[side] + DELAY, other[side], packet))
        while arriving and arriving[0][0] <= now:
            _, side, packet = heapq.heappop(arriving)
            try:
                os.write(side, packet)
            except OSError:  # the interface is down
                continue


if __name__ == "__main__":
    carry(*map(interface, sys.argv[1:3]))
