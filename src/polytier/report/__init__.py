"""Reports about finished and unfinished runs, read from their files: tables, charts, pages and figures."""
