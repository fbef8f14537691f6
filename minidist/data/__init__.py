"""Chapter 01: who gets which sample. Partitions, corpora, the loader, and what counting reaches. Imports no comm."""
