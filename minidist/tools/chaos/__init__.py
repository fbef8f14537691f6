"""`minidist chaos`: inject faults into training runs, resume them, and check that nothing was lost.

faults     the kinds of faults, and the phases of a step and of a save
injector   the observer and the meter that inject one fault into a run (`minidist train --fault.inject`)
plan       draws trials (layout, fault, layout of the resumed run) from a seed
trial      runs one trial on fresh ranks and checks its outcome
command    the command: a line per trial, and a table
"""
