"""Signatures of state files: a cluster signs what it saves, and loads what a cluster that it
believes has signed.

The key pair is Ed25519, and follows from the cluster's key. A digest finds accidents; the signature
says who computed the state, which nobody can tell from the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable

from ferryman.errors import ConfigError, PermissionDenied
from ferryman.security.cluster_key import ClusterKey, Purpose
from ferryman.security.order_signatures import OrderSigner, OrderVerifier, statement

PUBLIC_KEY_DIGITS = 64


def is_state_signed(signer: str, signature: bytes, text: str) -> bool:
    """Whether the holder of a key, by its public half in hex, has signed this text."""
    try:
        return OrderVerifier((signer,)).verifies(signature, _signed(text))
    except ValueError:  # no public key
        return False


class StateSigner:
    """A cluster's signatures. It believes its own and those of the `believed` public keys. Raises
    ConfigError for a text that is no public key."""

    def __init__(self, key: ClusterKey, believed: Iterable[str] = ()) -> None:
        self._signer = OrderSigner(key.subkey(Purpose.STATE_FILE).secret.hex())
        self._believed = {self.public_key, *map(_checked, believed)}

    @property
    def public_key(self) -> str:
        """The public half, in hex."""
        return self._signer.public_key

    def sign(self, text: str) -> bytes:
        return self._signer.sign(_signed(text))

    def check(self, signer: str, signature: bytes, text: str) -> None:
        """Raises PermissionDenied unless a believed key signed this text."""
        if signer not in self._believed:
            raise PermissionDenied(
                f"the state file was saved by a cluster with the key {signer[:PUBLIC_KEY_DIGITS]},"
                " which is not believed here: if you trust it, add it to STATE_SIGNERS"
            )
        if not is_state_signed(signer, signature, text):
            raise PermissionDenied("the state file was changed after it had been signed")


def _signed(text: str) -> bytes:
    return statement("state file", text)


def _checked(public_key: str) -> str:
    digits = public_key.strip().lower()
    if len(digits) != PUBLIC_KEY_DIGITS or not set(digits) <= set("0123456789abcdef"):
        raise ConfigError(f"STATE_SIGNERS: a public key has {PUBLIC_KEY_DIGITS} hex digits")
    return digits
