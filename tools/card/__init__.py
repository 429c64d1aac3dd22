"""Everything that is asked of a card, in one go: `bash tools/card/check.sh`."""
