"""Chapter 6: in which number format each thing is, and what keeps small numbers from being lost."""
