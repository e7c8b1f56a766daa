"""From the catalog and the views of a run to its series, within `max_series`."""
