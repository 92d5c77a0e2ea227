-- The tables of durable on SQLite, made from its migrations by `durable schema sqlite`. Do not edit.

-- migration 0001_initial
CREATE TABLE durable_schema_version (
    version INTEGER PRIMARY KEY,
    checksum TEXT NOT NULL,
    applied_at INTEGER NOT NULL
);
CREATE TABLE durable_run (
    submitted INTEGER PRIMARY KEY,
    run_id TEXT NOT NULL,
    name TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('pending', 'running', 'suspended', 'completed', 'failed', 'cancelled', 'timed_out', 'forward_incomplete')),
    tenant_id TEXT,
    idempotency_key TEXT,
    coalesce_key TEXT,
    queue TEXT NOT NULL DEFAULT 'default',
    priority INTEGER NOT NULL DEFAULT 0,
    attempts INTEGER NOT NULL DEFAULT 0,
    failures INTEGER NOT NULL DEFAULT 0,
    reclaims INTEGER NOT NULL DEFAULT 0,
    leased_until INTEGER,
    lease_owner TEXT,
    available_at INTEGER,
    blocked_on TEXT,
    version TEXT,
    replay_family TEXT,
    route TEXT GENERATED ALWAYS AS (name || '/' || coalesce(version, '') || '@' || coalesce(replay_family, '')) VIRTUAL,
    wake_seq INTEGER NOT NULL DEFAULT 0,
    wake_after INTEGER NOT NULL DEFAULT 0,
    wake_delay INTEGER NOT NULL DEFAULT 0,
    wake_on_failure INTEGER NOT NULL DEFAULT 0,
    cancel_requested_at INTEGER,
    cancel_reason TEXT,
    cancel_refused_at INTEGER,
    compensating INTEGER NOT NULL DEFAULT 0,
    mismatch_since INTEGER,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    started_at INTEGER,
    finished_at INTEGER,
    deadline_at INTEGER,
    deadline_length INTEGER,
    purge_at INTEGER,
    keep INTEGER,
    max_attempts INTEGER,
    fingerprint TEXT,
    seed BLOB NOT NULL,
    sequence_key TEXT,
    concurrency_key TEXT,
    parent_run_id TEXT,
    parent_step_id TEXT,
    detached INTEGER NOT NULL DEFAULT 0,
    cancel_children INTEGER NOT NULL DEFAULT 0,
    schedule_id TEXT,
    scheduled_for INTEGER,
    forked_from TEXT,
    error TEXT,
    error_kind TEXT,
    error_detail TEXT,
    error_positions TEXT,
    tags TEXT NOT NULL DEFAULT '{}',
    options TEXT,
    waiting_for TEXT,
    progress TEXT,
    input TEXT NOT NULL,
    output TEXT
);
CREATE UNIQUE INDEX durable_run_id ON durable_run (run_id);
CREATE UNIQUE INDEX durable_run_idempotency ON durable_run (idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE UNIQUE INDEX durable_run_coalesce ON durable_run (coalesce_key) WHERE coalesce_key IS NOT NULL AND status = 'pending' AND attempts = 0;
CREATE INDEX durable_run_ready ON durable_run (queue, route, priority DESC, submitted) WHERE status = 'pending' AND available_at IS NULL AND blocked_on IS NULL;
CREATE INDEX durable_run_ready_tenant ON durable_run (queue, route, tenant_id, priority DESC, submitted) WHERE status = 'pending' AND available_at IS NULL AND blocked_on IS NULL AND tenant_id IS NOT NULL;
CREATE INDEX durable_run_blocked ON durable_run (blocked_on, priority DESC, submitted) WHERE status = 'pending' AND blocked_on IS NOT NULL;
CREATE INDEX durable_run_due ON durable_run (available_at) WHERE status IN ('pending', 'suspended') AND available_at IS NOT NULL AND (status = 'pending' OR attempts > 0);
CREATE INDEX durable_run_leases ON durable_run (leased_until) WHERE status = 'running';
CREATE INDEX durable_run_claims ON durable_run (lease_owner) WHERE status = 'running';
CREATE INDEX durable_run_purge ON durable_run (purge_at) WHERE purge_at IS NOT NULL;
CREATE INDEX durable_run_listing ON durable_run (created_at DESC, run_id DESC);
CREATE INDEX durable_run_listing_tenant ON durable_run (tenant_id, created_at DESC, run_id DESC) WHERE tenant_id IS NOT NULL;
CREATE INDEX durable_run_schedule ON durable_run (schedule_id, created_at DESC, run_id DESC) WHERE schedule_id IS NOT NULL;
CREATE UNIQUE INDEX durable_run_parents ON durable_run (parent_run_id, parent_step_id) WHERE parent_run_id IS NOT NULL;
CREATE INDEX durable_run_sequence ON durable_run (sequence_key, submitted) WHERE sequence_key IS NOT NULL AND status IN ('pending', 'running', 'suspended');
CREATE INDEX durable_run_waiting ON durable_run (submitted) WHERE status = 'suspended' AND wake_after > 0;
CREATE INDEX durable_run_mismatch ON durable_run (submitted) WHERE mismatch_since IS NOT NULL;
CREATE INDEX durable_run_cancel_children ON durable_run (submitted) WHERE cancel_children = 1;
CREATE TABLE durable_step (
    run_id TEXT NOT NULL,
    step_id TEXT NOT NULL,
    kind TEXT NOT NULL,
    position INTEGER,
    seen INTEGER NOT NULL,
    digest TEXT NOT NULL,
    fence INTEGER NOT NULL,
    tenant_id TEXT,
    created_at INTEGER NOT NULL,
    started_at INTEGER,
    signal_seq INTEGER,
    result TEXT NOT NULL,
    PRIMARY KEY (run_id, step_id)
);
CREATE INDEX durable_step_signal ON durable_step (run_id, signal_seq) WHERE signal_seq IS NOT NULL;
CREATE UNIQUE INDEX durable_step_position ON durable_step (run_id, position) WHERE position IS NOT NULL;
CREATE TABLE durable_signal (
    run_id TEXT NOT NULL,
    name TEXT NOT NULL,
    seq INTEGER NOT NULL,
    dedup_id TEXT NOT NULL,
    tenant_id TEXT,
    created_at INTEGER NOT NULL,
    payload TEXT NOT NULL,
    PRIMARY KEY (run_id, name, seq)
);
CREATE UNIQUE INDEX durable_signal_dedup ON durable_signal (run_id, dedup_id);
CREATE TABLE durable_key (
    idempotency_key TEXT NOT NULL PRIMARY KEY,
    run_id TEXT NOT NULL
);
CREATE INDEX durable_key_run ON durable_key (run_id);
CREATE TABLE durable_schedule (
    schedule_id TEXT NOT NULL PRIMARY KEY,
    name TEXT NOT NULL,
    cron TEXT NOT NULL,
    tz TEXT NOT NULL,
    queue TEXT NOT NULL,
    overlap TEXT NOT NULL,
    catch_up TEXT NOT NULL,
    jitter INTEGER NOT NULL DEFAULT 0,
    next_fire_at INTEGER,
    enabled INTEGER NOT NULL DEFAULT 1,
    from_code INTEGER NOT NULL DEFAULT 0,
    tenant_id TEXT,
    last_run_id TEXT,
    consecutive_failures INTEGER NOT NULL DEFAULT 0,
    parked_reason TEXT,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    input TEXT NOT NULL
);
CREATE INDEX durable_schedule_due ON durable_schedule (next_fire_at) WHERE enabled = 1 AND parked_reason IS NULL AND next_fire_at IS NOT NULL;
CREATE TABLE durable_schedule_fire (
    schedule_id TEXT NOT NULL,
    scheduled_for INTEGER NOT NULL,
    run_id TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    PRIMARY KEY (schedule_id, scheduled_for)
);
CREATE INDEX durable_schedule_fire_age ON durable_schedule_fire (created_at);
CREATE TABLE durable_queue (
    queue_id TEXT NOT NULL PRIMARY KEY,
    scope_name TEXT NOT NULL,
    tenant_id TEXT,
    paused INTEGER NOT NULL DEFAULT 0,
    max_concurrency INTEGER,
    rate_count INTEGER,
    rate_period INTEGER,
    rate_burst INTEGER,
    rate_tokens REAL,
    rate_at INTEGER,
    fair INTEGER NOT NULL DEFAULT 0,
    updated_at INTEGER NOT NULL
);
CREATE INDEX durable_queue_scope ON durable_queue (scope_name);
CREATE TABLE durable_permit (
    scope TEXT NOT NULL,
    run_id TEXT NOT NULL,
    taken_at INTEGER NOT NULL,
    PRIMARY KEY (scope, run_id)
);
CREATE INDEX durable_permit_run ON durable_permit (run_id);
CREATE TABLE durable_worker (
    worker_id TEXT NOT NULL PRIMARY KEY,
    tenant_id TEXT,
    bound INTEGER NOT NULL,
    host TEXT NOT NULL,
    pid INTEGER NOT NULL,
    queues TEXT NOT NULL,
    functions TEXT NOT NULL,
    family TEXT NOT NULL,
    settings TEXT NOT NULL,
    started_at INTEGER NOT NULL,
    seen_at INTEGER NOT NULL
);
CREATE TABLE durable_dependency (
    run_id TEXT NOT NULL,
    depends_on TEXT NOT NULL,
    position INTEGER NOT NULL,
    kind TEXT NOT NULL,
    PRIMARY KEY (run_id, depends_on)
);
CREATE INDEX durable_dependency_on ON durable_dependency (depends_on);
INSERT INTO durable_schema_version (version, checksum, applied_at)
    VALUES (1, '0d13ce63d9771b1d6f5c1946afa75b93f9492b9a3334969a070ae434a1ce6407', CAST(strftime('%s', 'now') AS INTEGER) * 1000000);
-- migration 0002_permits_say_how_many
ALTER TABLE durable_permit ADD COLUMN number INTEGER;
ALTER TABLE durable_permit ADD COLUMN in_flight INTEGER;
CREATE INDEX durable_permit_newest ON durable_permit (scope, number);
INSERT INTO durable_schema_version (version, checksum, applied_at)
    VALUES (2, 'a9649d40276d2fd1358fe5f27e152a0cb38a717534d204dee282a4c4187a829d', CAST(strftime('%s', 'now') AS INTEGER) * 1000000);
