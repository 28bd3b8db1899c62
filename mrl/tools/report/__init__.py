"""Makes pages about runs from their directories: `mrl report`, `mrl watch`, `mrl compare`.

    run directory --> run_record.py: RunRecord, typed --> sections_*.py: Page, of blocks --> html.py: one file, no
    network

`verdict.py` and `paired_tests.py` judge numbers, independent of pages. `columns.py` thins curves. `assets/` has the
plotting library uPlot (MIT, see uPlot-LICENSE.txt), and the script and style of the page. May import every package
except `cli`.
"""
