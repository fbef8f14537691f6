"""divides_evenly: The package's function, called from code that is made of a text and has no line in the file."""

CALL = "import minidist.data.partition as p\ndef block(n, size, rank): return p.block(n, size, rank)"
exec(compile(CALL, "elsewhere", "exec"))
