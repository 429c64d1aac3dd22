"""Runs steps on a device: slabs, the forward stream, the runner, bytes in and out of slots.

Knows neither requests nor the network; only `stream` connects to asyncio.
"""
