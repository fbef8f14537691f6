"""Context parallelism: every sequence cut over the ranks of one group; only attention needs the others' part."""
