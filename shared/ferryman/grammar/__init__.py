"""Output grammars at work: compiled within limits, followed token by token, asked for masks.

llguidance does the parsing; it is seen here alone. No torch, no network: the router's door, the
workers' doors, the sampler and the offline engine all use this.
"""
