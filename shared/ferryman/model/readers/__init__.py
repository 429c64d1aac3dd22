"""From fields of `config.json` to the shapes that families share."""
