"""A client of any server that answers OpenAI's chat completions or completions.

    async with open_endpoint("http://127.0.0.1:8000") as endpoint:
        reply = await endpoint.ask(Inquiry((ChatMessage("user", "Where is the red kite?"),), 16))

It asks as a stranger does: by HTTP, and by fields that the server's own documentation names.
"""
