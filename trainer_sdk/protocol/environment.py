"""Names of the environment variables through which the supervisor reaches a rank."""

SOCKET = "LASTGASP_SOCKET"
LAUNCH = "LASTGASP_LAUNCH"
JOB_ID = "LASTGASP_JOB_ID"
