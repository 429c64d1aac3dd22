"""The commands of `ferryman`: what each says of itself, and its flags.

Imports of what a command does stand within its function, so that `ferryman --help` stays quick.
"""
