"""What ranks run: functions of a Context, with no test framework in them."""
