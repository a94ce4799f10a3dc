"""The papers' tables and figures, run again: `fedclade reproduce`."""
