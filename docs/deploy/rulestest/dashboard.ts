// What Grafana's own types say about a dashboard. The test appends the one of docs/deploy, and the compiler reports each field that Grafana does not have
// and each value that it does not allow.
import type * as grafana from '@grafana/grafana-foundation-sdk/dashboard';
import type * as prometheus from '@grafana/grafana-foundation-sdk/prometheus';
import type * as stat from '@grafana/grafana-foundation-sdk/stat';
import type * as timeseries from '@grafana/grafana-foundation-sdk/timeseries';

// JSON holds the values of an enumeration instead of its names, and Grafana fills in what is missing.
type Plain<T> = T extends string ? `${T}` : T extends (infer E)[] ? Plain<E>[] : T extends object ? { [K in keyof T]?: Plain<T[K]> } : T;

type Panel<Type extends string, Options, Custom> = Plain<Omit<grafana.Panel, 'type' | 'options' | 'targets' | 'fieldConfig'>> & {
  type: Type;
  options: Plain<Options>;
  targets: Plain<Omit<prometheus.Dataquery, '_implementsDataqueryVariant'>>[];
  fieldConfig: {
    defaults: Plain<Omit<grafana.FieldConfig, 'custom'>> & { custom?: Plain<Custom> };
    overrides: grafana.FieldConfigSource['overrides'];
  };
};

type Dashboard = Plain<Omit<grafana.Dashboard, 'panels'>> & {
  panels: ((Plain<grafana.RowPanel> & { type: 'row' }) | Panel<'stat', stat.Options, never> | Panel<'timeseries', timeseries.Options, timeseries.FieldConfig>)[];
};

export const dashboard: Dashboard =
