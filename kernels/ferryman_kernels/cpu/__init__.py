"""The ground of compiled CPU loops: compiler, cache on disk, vectors, lanes and tiles."""
