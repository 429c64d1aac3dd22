"""`ferryman what-if`: the requests of a lifecycle log through the cluster as it is set, held
against what the log measured, and then through the same cluster with other settings.

observed         measurements in the log
recorded_log     a log in a file, with the cluster that wrote it
selection        the requests of a log that are simulated
served_settings  the settings, as processes have them, and the workers
scenario         a simulated cluster of such settings
figures          the figures that are compared, and whether the simulation may be trusted
tunable          the settings that a simulation knows, and other values for them
setting_words    the ways in which such a value is set
search           the values that gain something, alone and together
run              all of it over one log
report           lines of 80 columns, and JSON
"""
