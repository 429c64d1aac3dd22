"""The OpenAI door: what its JSON means, what is refused and how, and the bytes that go back."""
