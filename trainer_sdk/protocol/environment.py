"""Names of the environment variables through which the supervisor reaches a rank."""

SOCKET = "LASTGASP_SOCKET"
LAUNCH = "LASTGASP_LAUNCH"
JOB_ID = "LASTGASP_JOB_ID"
# Set by the SDK in the process that holds the run of a rank, for that process's children to see.
HOLDER = "LASTGASP_RUN_PID"
