"""Pages about runs, made from what their directories hold: `mrl report`, `mrl watch`, `mrl compare`.

    run directory --> run_record.py: RunRecord, typed --> sections_*.py: Page, of blocks --> html.py: one file, no
    network

`verdict.py` and `heldout.py` judge numbers and know no page; `columns.py` thins curves; `assets/` has the plotting
library, uPlot (MIT, see uPlot-LICENSE.txt), the script and the style of the page. May import every room but `cli`.
"""
