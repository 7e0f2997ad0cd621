"""Measurements of taskstore beside other stores, in one run on one machine: ``python -m benchmarks --help``.

Method. Every backend runs in a process of its own, with the same loop and the same five steps around it (see
``work``), and on a database of its own that is new for each run, on the same disk. The runs are interleaved: in each
round every backend runs once, in an order that is drawn anew, so that what slows the machine down for a while slows all
of them. A ratio compares two runs of the same round. The table gives the median over the rounds and its range.

Some scenarios begin with a database that holds tasks already (``--sizes``): copies of one task, made by SQL. A second
table tells their parts, and how each grows with the size:

    recover   a process dies and leaves so many live tasks; from the opening of the store in a new process to the
              verdict of all of them, with that process's CPU time and resident memory
    list      the first page of 50 of one owner, of whom a tenth of the tasks are
    sweep     so many expired tasks are deleted while four clients create others; what these wait, with and without
    growth    get, list, create, complete, a recovery and a sweep that find nothing to do, beside so many finished
              tasks; the database's size and the resident memory
"""
