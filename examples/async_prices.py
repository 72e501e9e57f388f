"""Async handlers: many calls of a slow service at once, one at a time and in order for each key.

`python examples/feed.py baskets` writes messages (see there for the broker); then, in this folder:

    penstock run async_prices:app
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator

import penstock


class PriceService:
    """Stands for an HTTP client: a call takes 50 ms, and many may be under way."""

    def __init__(self) -> None:
        self.calls = self.under_way = self.most = 0

    async def price(self, basket: str) -> int:
        """Ask for the price of a basket."""
        self.calls += 1
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0.05)
        self.under_way -= 1
        return 10 * len(basket)


service = PriceService()
app = penstock.App(
    "async-prices",
    bootstrap_servers=os.environ.get("PENSTOCK_BOOTSTRAP_SERVERS", "127.0.0.1:9092"),
    max_concurrency=20,
)


@app.lifespan
async def client() -> AsyncGenerator[None, None]:
    """Open the client before the first message and close it after the last one, on the handlers' event loop."""
    print("the client is open", flush=True)
    yield
    print(f"the client is closed after {service.calls} calls, at most {service.most} at once", flush=True)


@app.handler("baskets")
async def price(message: penstock.Message) -> None:
    """Price the baskets of one customer in turn, and those of up to twenty customers at once."""
    key, basket = (message.key or b"").decode(), (message.value or b"").decode()
    print(f"{key}: {basket} costs {await service.price(basket)}", flush=True)
