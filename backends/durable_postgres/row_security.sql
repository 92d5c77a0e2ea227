-- Row-level security for durable on PostgreSQL, as an option: the database itself refuses another tenant's rows to a role that is bound to one
-- tenant. Run by the owner of the tables, in one transaction, after each `durable migrate`; running it again changes nothing.
-- Roles that serve everybody are the owner, or have BYPASSRLS. A role that is neither, and not in durable_tenant_role, sees no row.

-- Which tenant a role is bound to. Only the owner reads and writes it. Roles log in themselves: SET ROLE binds nobody.
CREATE TABLE IF NOT EXISTS durable_tenant_role (
    role_name   text COLLATE "C" NOT NULL PRIMARY KEY,
    tenant_id   uuid NOT NULL
);
REVOKE ALL ON durable_tenant_role FROM PUBLIC;

CREATE OR REPLACE FUNCTION durable_bound_tenant() RETURNS uuid LANGUAGE sql STABLE SECURITY DEFINER SET search_path = @schema, pg_temp
    AS $$ SELECT t.tenant_id FROM durable_tenant_role AS t WHERE t.role_name = session_user $$;

-- Tables that say whose a row is.
ALTER TABLE durable_run ENABLE ROW LEVEL SECURITY;
DROP POLICY IF EXISTS durable_own ON durable_run;
CREATE POLICY durable_own ON durable_run USING (tenant_id = (SELECT durable_bound_tenant()));
ALTER TABLE durable_step ENABLE ROW LEVEL SECURITY;
DROP POLICY IF EXISTS durable_own ON durable_step;
CREATE POLICY durable_own ON durable_step USING (tenant_id = (SELECT durable_bound_tenant()));
ALTER TABLE durable_signal ENABLE ROW LEVEL SECURITY;
DROP POLICY IF EXISTS durable_own ON durable_signal;
CREATE POLICY durable_own ON durable_signal USING (tenant_id = (SELECT durable_bound_tenant()));
ALTER TABLE durable_schedule ENABLE ROW LEVEL SECURITY;
DROP POLICY IF EXISTS durable_own ON durable_schedule;
CREATE POLICY durable_own ON durable_schedule USING (tenant_id = (SELECT durable_bound_tenant()));

-- Tables whose key begins with the tenant.
ALTER TABLE durable_key ENABLE ROW LEVEL SECURITY;
DROP POLICY IF EXISTS durable_own ON durable_key;
CREATE POLICY durable_own ON durable_key USING (starts_with(idempotency_key, (SELECT durable_bound_tenant())::text || ':'));
ALTER TABLE durable_schedule_fire ENABLE ROW LEVEL SECURITY;
DROP POLICY IF EXISTS durable_own ON durable_schedule_fire;
CREATE POLICY durable_own ON durable_schedule_fire USING (starts_with(schedule_id, (SELECT durable_bound_tenant())::text || ':'));

-- The edges of a graph go with their node.
ALTER TABLE durable_dependency ENABLE ROW LEVEL SECURITY;
DROP POLICY IF EXISTS durable_own ON durable_dependency;
CREATE POLICY durable_own ON durable_dependency
    USING (EXISTS (SELECT 1 FROM durable_run AS r WHERE r.run_id = durable_dependency.run_id));

-- Workers that serve everybody can be seen, not touched.
ALTER TABLE durable_worker ENABLE ROW LEVEL SECURITY;
DROP POLICY IF EXISTS durable_own ON durable_worker;
CREATE POLICY durable_own ON durable_worker USING (bound AND tenant_id = (SELECT durable_bound_tenant()));
DROP POLICY IF EXISTS durable_shared ON durable_worker;
CREATE POLICY durable_shared ON durable_worker FOR SELECT USING (NOT bound AND (SELECT durable_bound_tenant()) IS NOT NULL);

-- A limit of everybody counts the runs of a bound worker, too: it reads that row, locks it, and spends its tokens; nothing else of it.
ALTER TABLE durable_queue ENABLE ROW LEVEL SECURITY;
DROP POLICY IF EXISTS durable_own ON durable_queue;
CREATE POLICY durable_own ON durable_queue USING (tenant_id = (SELECT durable_bound_tenant()));
DROP POLICY IF EXISTS durable_shared_read ON durable_queue;
CREATE POLICY durable_shared_read ON durable_queue FOR SELECT
    USING (starts_with(queue_id, '*:') AND (SELECT durable_bound_tenant()) IS NOT NULL);
DROP POLICY IF EXISTS durable_shared_spend ON durable_queue;
CREATE POLICY durable_shared_spend ON durable_queue FOR UPDATE
    USING (starts_with(queue_id, '*:') AND (SELECT durable_bound_tenant()) IS NOT NULL);
CREATE OR REPLACE FUNCTION durable_only_spent() RETURNS trigger LANGUAGE plpgsql SET search_path = @schema, pg_temp AS $$
BEGIN
    IF starts_with(OLD.queue_id, '*:') AND durable_bound_tenant() IS NOT NULL
        AND (to_jsonb(NEW) - 'rate_tokens' - 'rate_at') IS DISTINCT FROM (to_jsonb(OLD) - 'rate_tokens' - 'rate_at') THEN
        RAISE insufficient_privilege USING MESSAGE = 'a role that is bound to a tenant changes no limit of everybody';
    END IF;
    RETURN NEW;
END $$;
DROP TRIGGER IF EXISTS durable_only_spent ON durable_queue;
CREATE TRIGGER durable_only_spent BEFORE UPDATE ON durable_queue FOR EACH ROW EXECUTE FUNCTION durable_only_spent();

-- Permits of everybody's scopes are counted by all; taken and given back for one's own runs only.
ALTER TABLE durable_permit ENABLE ROW LEVEL SECURITY;
DROP POLICY IF EXISTS durable_own ON durable_permit;
CREATE POLICY durable_own ON durable_permit
    USING (EXISTS (SELECT 1 FROM durable_run AS r WHERE r.run_id = durable_permit.run_id));
DROP POLICY IF EXISTS durable_shared ON durable_permit;
CREATE POLICY durable_shared ON durable_permit FOR SELECT
    USING (starts_with(scope, '*/') AND (SELECT durable_bound_tenant()) IS NOT NULL);

-- The views show what their reader may see, not what their owner may.
ALTER VIEW durable_v_runs SET (security_invoker = true);
ALTER VIEW durable_v_steps SET (security_invoker = true);
ALTER VIEW durable_v_functions SET (security_invoker = true);
ALTER VIEW durable_v_queues SET (security_invoker = true);
