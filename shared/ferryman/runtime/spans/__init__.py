"""Spans of OpenTelemetry, made of the lifecycle events that every process publishes anyway.

    event of the lifecycle ──► LifecycleSpans ──► SpanQueue ──► a thread ──► collector (OTLP)
                               opens and closes    bounded      batches

A process makes the spans of its own events; the W3C context that travels with a request joins them.
Without a collector there is no queue, no thread and no import of the SDK, and an event costs the
call of a function that does nothing.
"""
